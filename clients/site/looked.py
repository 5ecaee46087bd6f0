"""What a site tells of its data before any training: `fedda look`, for sites whose policy says so.

It is told once: who asks again gets the same bytes, until LEAST examples have come or gone since.
So two answers differ by many examples, or not at all, whoever asks and however often. The server
chooses nothing of it: no model, no columns, no sizes.
"""

import json
import logging
from base64 import b64decode, b64encode

import numpy as np
import torch
from numpy.typing import NDArray

from fedda import data, records, wire
from fedda.data.form import Form
from fedda.data.load import open_site
from fedda.data.sets import Unlabelled
from fedda.errors import DataError
from fedda.files import keeping
from fedda.look.account import SIDE, Account, statistics
from fedda.maths.summaries import FLOOR, LEAST, tens
from fedda.train import seed_for
from fedda.wire import Manifest, Packed

from .memory import Site
from .request import Numbers

logger = logging.getLogger("fedda.site")

MOST = 20_000  # examples that the statistics are over; of more they are drawn
FILE = "look.json"  # in the site's state folder: what was told, and of which examples
Marks = NDArray[np.uint64]  # of examples, to count how many have changed


def tell(site: Site) -> tuple[dict[str, Packed], Numbers]:
    """Return what may leave: statistics, of enough examples, and the table beside them.

    Raises:
        PolicyError: this site's policy does not say that it may.
        BudgetError: a budget of the policy is spent.
        DataError: the data cannot be read.
    """
    site.gate.admit_look(site.labels)
    arrays, table = _told(site)
    sizes = records.size(records.write(arrays, look=table))
    site.gate.release(arrays, sum(sizes.values()), wire.LOOK)
    logger.info("sent after look: %s", ", ".join(f"{k} {n:,} bytes" for k, n in sizes.items()))
    return arrays, table


def _told(site: Site) -> tuple[dict[str, Packed], Numbers]:
    """What was told before of about these examples, else what is told from now on."""
    about = data.describe(site.path, site.role, site.reading)
    size = SIDE if about.kind == "image" else 0
    x = torch.empty(0)
    if not about.needs_window:  # else only a run says how dark and bright its images are
        form = Form(0, size, "stretch", site.cache, site.reading.gray, logger.debug, True)
        x = open_site(site.path, site.reading).target(form, None).x  # no label is read
    marks = np.frombuffer(b"".join(Unlabelled(x).digests()), np.uint64)[::2]
    if (before := _recalled(site, marks)) is not None:
        return before
    counts = {n: tens(count) for n, count in about.counts.items() if count >= FLOOR}
    classes = counts if site.labels else {}
    told = Account(
        *(site.role, site.name, about.kind, about.shape, tens(about.train), classes),
        columns=about.columns,
    )
    draws = site.draws_of_noise(seed_for("look", site.name))
    chosen = torch.from_numpy(draws.permutation(len(x))[:MOST])
    arrays = {"look": statistics(x[chosen], site.noise, draws)} if len(x) >= _least(site) else {}
    _remember(site, marks, arrays, told.table())
    return arrays, told.table()


def _least(site: Site) -> int:
    """The examples that statistics are over, and that have to change before others are told."""
    return max(LEAST, site.min_images)


def _recalled(site: Site, marks: Marks) -> tuple[dict[str, Packed], Numbers] | None:
    """What was told before, unless too many examples, the site's role or its name have changed."""
    if site.state_dir is None or not (file := site.state_dir / site.name / FILE).is_file():
        return None
    try:
        kept = json.loads(file.read_text())
        table, known = kept["table"], np.frombuffer(b64decode(kept["marks"]), np.uint64)
        arrays = {
            n: Packed(Manifest.parse(m), b64decode(b)) for n, (m, b) in kept["arrays"].items()
        }
        same = (table["role"], table["name"]) == (site.role, site.name)
        stricter = kept["least"] < _least(site) or kept["noise"] < site.noise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{file}, which holds what this site has told of its data, cannot be read ({error}); "
            "restore it, or remove it to tell anew."
        ) from None
    if not same or len(np.setxor1d(known, marks)) >= _least(site):
        return None
    if arrays and stricter:
        logger.warning("no statistics leave: this site is stricter than when it made %s", file)
        return {}, table
    return arrays, table


def _remember(site: Site, marks: Marks, arrays: dict[str, Packed], table: Numbers) -> None:
    """Keep what is told, before it leaves."""
    if site.state_dir is None:
        return
    told = {n: (p.manifest.text, b64encode(p.buffer).decode()) for n, p in arrays.items()}
    kept = {"table": table, "arrays": told, "marks": b64encode(marks.tobytes()).decode()}
    kept |= {"least": _least(site), "noise": site.noise}
    file = site.state_dir / site.name / FILE
    with keeping(file, private=True) as part:
        part.write_text(json.dumps(kept))
