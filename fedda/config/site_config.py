"""The settings of one site: what its operator gives to `fedda-client`, and what its process adds.

They reach the code that trains as a flat table of text and numbers, as Flower's `node_config`, and
never leave the site.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from fedda.config import FEATURES_HIDE, IMAGES_HIDE
from fedda.config.sections import Scalar, Section, validate


class FileOptions(Section):
    """What a site says of its own files: options of every command that reads data."""

    split: str = ""
    """The part of the data to train on: a folder NAME/ instead of train/, arrays x_NAME and y_NAME,
    or rows of this split in a table. The part test stays for testing, other parts are passed over.
    Default: train."""
    gray_bits: str = Field(default="auto", coerce_numbers_to_str=True)
    """Significant bits of image files with 16 bits of gray: with 12, 0 to 4095 become 0 to 255.
    Give the same at all sites with such scans. auto: as many as the file stores per pixel, 16 but
    for TIFF files packed to fewer."""
    skip_broken: bool = False
    """Pass over images of a folder or table that cannot be read, and say which; without it they are
    an error."""
    follow_links: bool = False
    """Read also what symbolic links, and paths in tables, name outside of the data's folder;
    without it they are an error. Give it if you trust whoever made the folder."""
    columns: str = ""
    """What a table calls its columns path (or image), label, split and id, where it does not call
    them so: path=filename,label=diagnosis. Of a table of numbers, values=age+weight takes these
    alone, in this order at all sites, and drop=visit+notes leaves these out. Of several sites,
    north:label=outcome holds for one."""


class SiteOptions(Section):
    """What a site's operator decides; each is an option of `fedda-client`."""

    role: Literal["source", "target"]
    """source: brings labelled data. target: brings data without labels."""
    data: Path
    """The site's data; see `fedda data check --help`."""
    name: str = ""
    """What the server calls this site; it must be the name that the key is registered for. Default:
    the key file's name (without .key); with --insecure, the data folder's."""
    device: str = "auto"
    """auto, cpu or cuda:N."""
    compile: bool = False
    """Let torch.compile make the networks faster; it takes up to minutes once, so it pays in long
    runs of large networks. Without a C++ compiler it has no effect."""
    key: Path | None = None
    """This site's own private key."""
    peers: Path | None = None
    """The public keys of the federation's sites, which you got from their operators and not from
    the server; needed where models are hidden from it (secure=sum, kd3a.relay=sealed)."""
    state_dir: Path | None = None
    """Where this site keeps its own files; one folder per running client. Default:
    ~/.local/state/fedda/NAME."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads to use. Default: all."""
    poison: float = Field(default=0.0, ge=0, le=100)
    """Share of labels to replace by wrong ones, in percent, for experiments."""
    min_images: int = Field(default=IMAGES_HIDE, ge=2)
    """Do not train on fewer images in a round: a model trained on a few images reveals too much
    about them. The server cannot change this."""
    min_examples: int = Field(default=FEATURES_HIDE, ge=1)
    """Send no gradient that is summed over fewer examples: from a gradient over a few examples,
    their features can be computed (`fedda audit gradients` tries it). The server cannot change
    this; a site with fewer examples cannot take part in methods that sum gradients."""
    noise: float = Field(default=0.0, ge=0)
    """Least Gaussian noise to add to each gradient before it is sent, in multiples of the norm that
    it is clipped to, and to each class mean; the server can only ask for more (exchange.noise).
    What FRUDA and f-DAN refuse still tells of images, unless the policy has protect.test-noise."""
    weights: Path | None = None
    """This site's copy of a pretrained network's weights, for runs whose weights come from a file.
    It must be the same as the server's."""
    start_from: Path | None = None
    """A finished model from which runs may start here (fedda run --start-from). This site trains no
    first model but the one that it draws itself and this one, as a model can be made to read single
    images: know where the file is from."""
    teacher: Path | None = None
    """A teacher that this target has already: its class probabilities of these images (.csv as
    `fedda predict` writes it, or .npz), or a model (.safetensors, or .onnx of `fedda export`).
    KD3A, SHOT, DECISION, Co-MDA and the last step hear it beside what the sources taught. It never
    leaves the site, and the server is not told."""
    reproducible: bool = False
    """Divide the images into blocks by this site's name instead of by chance, so that a run can be
    repeated exactly: for experiments on one machine. A round uses whole blocks, and nobody else
    should know which images these are."""
    cache: Literal["auto", "memory", "disk"] = "auto"
    """Where decoded images, tables of numbers and arrays of .npz and HDF5 files are kept: in
    memory, or on disk under --state-dir, so that they may be more than memory holds and a restart
    finds them. auto: on disk if they take more than 1 GB (or a quarter of memory). The last four
    sets are kept."""

    @field_validator("key", "peers", "state_dir", "weights", "start_from", "teacher", mode="before")
    @classmethod
    def _nothing(cls, value: object) -> object:
        """A table of text and numbers has no None."""
        return None if value == "" else value

    @field_validator("data", "key", "peers", "state_dir", "weights", "start_from", "teacher")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else value.absolute()


class SiteConfig(SiteOptions, FileOptions):
    """All settings of a site's process."""

    SEE: ClassVar[str] = " of a site; see fedda-client --help"

    policy: str = ""
    """its policy's settings as JSON"""
    server: str = ""
    """host:port of the server that it dials, or the folder of a socket file"""
    notes: bool = True
    """whether notes of a training are written under state_dir"""
    audited: bool = False
    """whether it books budgets and writes an audit log: its process is for this site alone"""
    forgetful: bool = False
    """whether another process may serve its next request, so that all it needs lies on the disk"""
    test_noise: float = Field(default=0.0, ge=0)
    """on each number of a test, in multiples of its largest value"""
    features_dir: Path | None = None
    """where features of frozen networks are kept; None: below state_dir"""
    source_only: Path | None = None
    """what a target's last step made of FedAvg's model, where another run trained that"""

    @classmethod
    def parse(cls, node: Mapping[str, Any]) -> "SiteConfig":
        """Read a flat table.

        Raises:
            ConfigError: a setting is missing, unknown or impossible.
        """
        return validate(cls, dict(node))

    def table(self) -> dict[str, Scalar]:
        """The same as a flat table: what was given, paths as text."""
        given = self.model_dump(by_alias=True, exclude_unset=True, exclude_none=True)
        return {key: str(v) if isinstance(v, Path) else v for key, v in given.items()}
