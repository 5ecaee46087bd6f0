"""The form in which a run wants a site's images: channels, size, and how they come to these."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from fedda.config.inputs import BITS, OWN, REFUSE, Inputs, Missing, Resize, scales_of, window_of
from fedda.config.sections import validate
from fedda.config.site_config import FileOptions
from fedda.data.cache import Cache
from fedda.data.samples import AS_STORED, Gray
from fedda.data.sets import AnySet
from fedda.errors import ConfigError, DataError

# torchvision evaluates on ImageNet at 224 pixels from the middle of images of 256.
_CROPPED_FROM = 256 / 224


AUTO = "auto"
COLUMNS = ("path", "image", "label", "split", "id", "values", "drop")  # that --columns may name
VALUES, DROP = "values", "drop"  # columns of numbers to take, or to leave out, with + between


@dataclass(frozen=True)
class Reading:
    """What is said of a site's files, for every command that reads them: by the site, but `window`.

    Attributes:
        split: the part of the data to train on; empty for `train`, or for all where there are no
            parts. The part `test` is for testing, unless it is the one to train on.
        gray_bits: significant bits of image files with 16 bits of gray, 8 to 16: 12 makes 4095
            white. 0: as many as each file stores (`fedda.data.samples`).
        skip_broken: whether images that cannot be read are passed over.
        follow_links: whether links, and paths in tables, may lead out of the data's folder.
        window: the run's `input.window`: low,high, own, scales of columns, or empty. It replaces
            `gray_bits`.
        columns: what a table calls the columns that fedda needs, as `path=file,label=diagnosis`,
            and which of its numbers to take, as `values=age+weight`, or to leave out, as
            `drop=visit`; `north:label=outcome` holds for the site of this name (`at`).
        missing: the run's `input.missing`: what becomes of gaps in vectors.
        needs: the columns of numbers that the run or the model takes, as `naming.brief` has them.
    """

    split: str = ""
    gray_bits: int = 0
    skip_broken: bool = False
    follow_links: bool = False
    window: str = ""
    columns: str = ""
    missing: Missing = REFUSE
    needs: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        split: str = "",
        gray_bits: int | str = AUTO,
        skip_broken: bool = False,
        follow_links: bool = False,
        columns: str = "",
    ) -> "Reading":
        """The same from what a person wrote.

        Args:
            split: a name, or nothing.
            gray_bits: 8 to 16, or auto.
            skip_broken: whether to pass over broken image files.
            follow_links: whether files may lie outside of the data's folder.
            columns: names of a table's columns, OURS=THEIRS,...

        Raises:
            ConfigError: one of them is none of these.
        """
        text = str(gray_bits)
        if text != AUTO and not (text.isdecimal() and 8 <= int(text) <= 16):
            raise ConfigError(f"--gray-bits is {text!r}; give 8 to 16, or auto.")
        if split.startswith((".", "-")) or "/" in split:
            raise ConfigError(f"--split is {split!r}; give the name of a split, such as train.")
        bits = 0 if text == AUTO else int(text)
        made = cls(split, bits, skip_broken, follow_links, columns=columns)
        for site in made.sites:
            assert made.at(site).named is not None  # raises ConfigError if it is no list of columns
        return made

    @classmethod
    def said(cls, site: Mapping[str, object]) -> "Reading":
        """The same from a site's configuration, which holds what `flat` gives.

        Raises:
            ConfigError: as `of`.
        """
        told = {key: site[key] for key in FileOptions().flat() if key in site}
        return cls.of(**validate(FileOptions, told).model_dump())

    def within(
        self, window: str, missing: Missing = REFUSE, needs: tuple[str, ...] = ()
    ) -> "Reading":
        """The same in a run or for a model; an empty window leaves that as it is.

        Raises:
            ConfigError: it is no window.
        """
        if bits := BITS.fullmatch(window):
            return replace(self.within("", missing, needs), gray_bits=int(bits[1]))
        try:
            window_of(window)
        except ValueError as error:
            raise ConfigError(f"The window is {window!r}; {error}.") from None
        return replace(self, window=window or self.window, missing=missing, needs=needs)

    def with_id(self, column: str) -> "Reading":
        """The same with a table's column that names its rows; an empty name leaves that as it is.

        Raises:
            ConfigError: another column is given for that already, or it is no name of one.
        """
        if not column:
            return self
        made = replace(self, columns=",".join(filter(None, [self.columns, f"id={column}"])))
        assert made.named is not None  # raises ConfigError
        return made

    def of_model(self, inputs: Inputs) -> "Reading":
        """The same for what a model, or a run, takes."""
        return self.within(inputs.window, inputs.missing, inputs.columns)

    def form(self, inputs: Inputs) -> dict[str, Any]:
        """How `fedda.data.load` brings a site's data to what a model takes: its arguments."""
        channels, size = inputs.shape[:2] if len(inputs.shape) == 3 else (0, 0)
        reading = self.of_model(inputs)
        return {"channels": channels, "size": size, "resize": inputs.resize, "reading": reading}

    @property
    def own(self) -> bool:
        """Whether vectors are scaled by the site's own mean and deviation."""
        return self.window == OWN

    @property
    def scales(self) -> Mapping[str, tuple[float, float]]:
        """The mean and deviation that columns have at all sites; none: the run says nothing."""
        return scales_of(self.window)

    @property
    def fills(self) -> bool:
        """Whether gaps in vectors are filled."""
        return self.missing != REFUSE

    @property
    def gray(self) -> Gray:
        """How gray of more than 8 bits becomes 8."""
        return Gray(self.gray_bits, window_of(self.window))

    @property
    def named(self) -> Mapping[str, str]:
        """A table's own names of the columns that fedda needs, by fedda's.

        Raises:
            ConfigError: `columns` does not say it.
        """
        return {ours: theirs for ours, theirs in self._named.items() if ours not in (VALUES, DROP)}

    @property
    def values(self) -> tuple[str, ...]:
        """The columns of numbers to take, in their order; none: all."""
        return self._several(VALUES)

    @property
    def dropped(self) -> tuple[str, ...]:
        """The columns of numbers to leave out."""
        return self._several(DROP)

    def _several(self, name: str) -> tuple[str, ...]:
        return tuple(self._named[name].split("+")) if name in self._named else ()

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites of which something is said alone, and none, of all."""
        return tuple(dict.fromkeys(["", *(site for site, _ in self._said)]))

    def at(self, site: str) -> "Reading":
        """The same for one of several sites: what is said of it alone wins over what is of all."""
        said = dict(self._said)
        its = {ours: theirs for (name, ours), theirs in said.items() if not name}
        its |= {ours: theirs for (name, ours), theirs in said.items() if name == site}
        return replace(self, columns=",".join(f"{ours}={theirs}" for ours, theirs in its.items()))

    @property
    def _said(self) -> Mapping[tuple[str, str], str]:
        """What tables call a column, by the site that alone does so, and fedda's name of it."""
        found: dict[tuple[str, str], str] = {}
        for each in filter(None, self.columns.split(",")):
            ours, _, theirs = (part.strip() for part in each.partition("="))
            site, _, ours = ours.rpartition(":")
            parts = theirs.split("+") if ours in (VALUES, DROP) else [theirs]
            twice = (site, ours) in found or len({*parts}) < len(parts)
            if twice or not all(parts) or ours not in COLUMNS:
                raise self._malformed
            found[site, ours] = theirs
        return found

    @property
    def _named(self) -> Mapping[str, str]:
        found = {ours: theirs for (_, ours), theirs in self._said.items()}
        if self.sites != ("",):
            raise ConfigError(
                f"--columns names the site {self.sites[1]!r}, and here is one site's data; leave "
                f"'{self.sites[1]}:' out."
            )
        if len(found) > len({*found.values()}):
            raise self._malformed
        return found

    @property
    def _malformed(self) -> ConfigError:
        return ConfigError(
            f"--columns is {self.columns!r}; give NAME=COLUMN,... with the names "
            f"{', '.join(COLUMNS)}, such as path=scan,label=diagnosis or values=age+weight, and "
            "north:label=outcome for the site north alone."
        )

    def flat(self) -> dict[str, str | bool]:
        """What the site says, as its configuration has it, and as `said` reads it."""
        said = {"skip-broken": self.skip_broken, "follow-links": self.follow_links}
        only = {name: value for name, value in (said | {"columns": self.columns}).items() if value}
        return {"split": self.split, "gray-bits": str(self.gray_bits or AUTO)} | only

    @property
    def words(self) -> list[str]:
        """What the site says, as the options of a command."""
        given = {name: value for name, value in self.flat().items() if value not in ("", AUTO)}
        return [
            word
            for name, value in given.items()
            for word in (f"--{name}", *([] if value is True else [str(value)]))
        ]


AS_IT_IS = Reading()


@dataclass(frozen=True)
class Form:
    """What becomes of a site's images when they are read.

    Attributes:
        channels: 1, 3, or 0 for what the images have.
        size: pixels per side, or 0 for what the images have.
        resize: how images come to that size. `stretch` scales width and height to it. `crop` is
            torchvision's evaluation on ImageNet: the shorter side becomes size * 256 / 224 pixels,
            then the square in the middle is kept. Without a size nothing is resized.
        cache: where decoded images are kept on disk; None keeps them in memory.
        gray: how gray of more than 8 bits becomes 8 (`Reading.gray`).
        notice: called with a sentence about images that look odd once all are decoded; None
            writes it to the log.
        blank_texts: whether columns of texts, which else a run has to code, come as gaps.
    """

    channels: int = 0
    size: int = 0
    resize: Resize = "stretch"
    cache: Cache | None = None
    gray: Gray = AS_STORED
    notice: Callable[[str], object] | None = None
    blank_texts: bool = False


def scaled(width: int, height: int, size: int) -> tuple[int, int]:
    """Width and height of an image before `crop` keeps its middle, as torchvision rounds them."""
    short = int(size * _CROPPED_FROM)
    if width <= height:
        return short, int(short * height / width)
    return int(short * width / height), short


def middle(length: int, size: int) -> int:
    """Where the middle `size` pixels of a side begin, as torchvision rounds it."""
    return round((length - size) / 2)


CHUNK = 512  # images converted at a time, so that working memory does not grow with the set


def conform(dataset: AnySet, channels: int, size: int, resize: Resize = "stretch") -> AnySet:
    """The same examples as images of `channels` channels and `size` x `size` pixels.

    Colour becomes grayscale by ITU-R 601 luma, grayscale becomes colour by repetition; sizes
    change by antialiased bilinear interpolation. Returns `dataset` itself when there is nothing to
    change.

    Args:
        dataset: images, or vectors if both numbers are 0.
        channels: 1, 3, or 0 to leave the channels as they are.
        size: pixels per side, or 0 to leave the size as it is.
        resize: `stretch` or `crop` (`Form`).
    """
    if channels == 0 and size == 0:
        return dataset
    if dataset.kind == "vector":
        raise DataError(
            f"this site's examples are vectors of {dataset.shape[0]} numbers and cannot become "
            f"images: leave input.channels and input.size at 0, or bring images"
        )
    x = conform_images(dataset.x, channels, size, resize)
    return dataset if x is dataset.x else replace(dataset, x=x)


def conform_images(x: Tensor, channels: int, size: int, resize: Resize = "stretch") -> Tensor:
    """`conform` on uint8 (N, c, h, w) -> uint8 (N, channels, size, size)."""
    n, c, h, w = x.shape
    channels = channels or c
    height, width = (size, size) if size else (h, w)
    crop = bool(size) and resize == "crop"
    if (c, h, w) == (channels, height, width) and not crop:
        return x
    if channels != c and {channels, c} != {1, 3}:
        raise DataError(
            f"images of {c} channels cannot get {channels}: only 1 (grayscale) and 3 (colour) "
            f"can be converted into each other; set input.channels to 1 or 3"
        )
    out = x.new_empty(n, channels, height, width)
    for part, into in zip(x.split(CHUNK), out.split(CHUNK), strict=True):
        if channels < c:
            part = luma(part)
        part = _resized(part, height, width, crop)
        into.copy_(part)  # one channel is repeated into three by broadcasting
    return out


def _resized(x: Tensor, height: int, width: int, crop: bool) -> Tensor:
    """Images (N, c, h, w) of another size -> (N, c, height, width)."""
    wide, high = scaled(x.shape[3], x.shape[2], width) if crop else (width, height)
    if x.shape[2:] != (high, wide):
        x = F.interpolate(x, size=(high, wide), mode="bilinear", antialias=True)
    top, left = middle(high, height), middle(wide, width)
    return x[:, :, top : top + height, left : left + width]


def luma(x: Tensor) -> Tensor:
    """ITU-R 601: 0.299 R + 0.587 G + 0.114 B, rounded as Pillow does -> uint8 (N, 1, H, W)."""
    r, g, b = x.int().split(1, dim=1)  # (N, 1, H, W) each
    return ((19595 * r + 38470 * g + 7471 * b + 0x8000) >> 16).to(x.dtype)
