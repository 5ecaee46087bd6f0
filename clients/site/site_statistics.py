"""What a site tells of its data before any training: `fedda look`, for sites whose policy says so.

It is told as often as the policy's budget.looks says, which is once: from two answers, before and
after one example came, that one could be computed. The server chooses nothing of it: no model, no
columns, no sizes.
"""

import logging
from functools import partial

import torch

from fedda import data, records, wire
from fedda.data.form import Form
from fedda.data.load import open_site
from fedda.data.odd_values import GAPS
from fedda.look.account import SIDE, Account, statistics
from fedda.maths.summaries import FLOOR, LEAST, tens
from fedda.train import seed_for
from fedda.wire.packing import Packed

from .memory import Site
from .request import Numbers

logger = logging.getLogger("fedda.site")

MOST = 20_000  # examples that the statistics are over; of more they are drawn


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


def _notice(site: Site, text: str) -> None:
    """Say here what no other site sees of the numbers, on which the rest of `fedda look` is."""
    (site.say if GAPS in text else logger.debug)(text)


def _told(site: Site) -> tuple[dict[str, Packed], Numbers]:
    about = data.describe(site.path, site.role, site.reading)
    size = SIDE if about.kind == "image" else 0
    x = torch.empty(0)
    if not about.needs_window:  # else only a run says how dark and bright its images are
        form = Form(0, size, "stretch", site.cache, site.reading.gray, partial(_notice, site), True)
        x = open_site(site.path, site.reading).target(form, None).x  # no label is read
    counts = {n: tens(count) for n, count in about.counts.items() if count >= FLOOR}
    classes = counts if site.labels else {}
    told = Account(
        *(site.role, site.name, about.kind, about.shape, tens(about.train), classes),
        columns=about.columns,
    )
    draws = site.draws_of_noise(seed_for("look", site.name))
    chosen = torch.from_numpy(draws.permutation(len(x))[:MOST])
    arrays = (
        {"look": statistics(x[chosen], site.noise, draws)}
        if len(x) >= max(LEAST, site.min_images)
        else {}
    )
    return arrays, told.table()
