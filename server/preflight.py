"""Ask sites, before a run begins, whether they can take part: their weights, and their data.

A frozen part of a network does not travel: each site makes it of its own copy of the weights, which
must be the server's. And a target's labelled tests must be of the run's classes, which only the
target itself can tell, as it does not name its classes. Without the weights a site could take no
part, and with other classes no round could be tested.
"""

from collections.abc import Iterable

from flwr.app import Message
from flwr.serverapp import Grid

from fedda import models, records
from fedda.config import ModelConfig
from fedda.errors import Code, RosterError, typed
from fedda.settings import Task

from .strategy_modules import mail, roster


def check(
    grid: Grid, task: Task, nodes: Iterable[roster.Node], wait: float, tests: bool = True
) -> None:
    """Ask all sites about the frozen part of a network, if it has one; else targets with tests.

    A site that gives another answer or none is not judged here: it is asked again in every round.

    Args:
        grid: the way to the sites.
        task: the training.
        nodes: the sites that are connected.
        wait: seconds to wait for answers; a site reads its weights for the first time.
        tests: whether targets will be tested.

    Raises:
        RosterError: sites do not have the server's weights, or cannot use their data in this run;
            the error names them.
    """
    frozen = task.model.freezes
    names = {
        node.id: node.name
        for node in nodes
        if frozen or (tests and node.role == "target" and node.tested)
    }

    def question(node_id: int) -> Message:
        content = records.write(task=task.flat())
        return Message(content, node_id, "query", ttl=wait, group_id="roster")

    failed: dict[int, list[str]] = {Code.WEIGHTS: [], Code.DATA: []}
    for reply in mail.Mail(grid).deliver(map(question, names), wait) if names else ():
        if reply.has_error() and reply.error.code in failed:
            failed[reply.error.code].append(names[reply.metadata.src_node_id])
    if without := failed[Code.WEIGHTS]:
        raise RosterError(_of_weights(sorted(without), task.model, task.frozen))
    if unfit := failed[Code.DATA]:
        raise RosterError(_of_data(sorted(unfit), task))


def _of_data(sites: list[str], task: Task) -> str:
    one = len(sites) == 1
    return (
        f"{', '.join(sites)} cannot use {'its' if one else 'their'} data in this run, and only "
        f"{'its' if one else 'their'} own log says why: labelled tests must be of the run's "
        f"classes ({', '.join(task.names)}), images whose gray values are signed or of 32 bits "
        "need input.window, vectors with gaps input.missing, and columns of texts "
        "input.categories. Mend it there, and begin the run again."
    )


def _of_weights(sites: list[str], config: ModelConfig, digest: str) -> str:
    if models.is_file(config.weights):
        remedy = f"start each with --weights and a copy of the server's {config.weights}"
    else:
        fetch = typed("fedda", "weights", config.name, config.weights)
        remedy = f"run `{fetch}` there, which shows the hash"
    one = len(sites) == 1
    return (
        f"{', '.join(sites)} {'does' if one else 'do'} not have the weights '{config.weights}' of "
        f"{config.name} with the server's hash {digest}, which model.train={config.train} needs at "
        f"every site: {remedy}, and begin the run again. {'Its' if one else 'Their'} own log says "
        "what is there instead."
    )
