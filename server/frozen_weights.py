"""Ask every site, before a run begins, whether it has the weights of what is frozen.

A frozen part does not travel: each site makes it of its own copy of the weights, which must be the
server's. A site without them could take no part in any round.
"""

from collections.abc import Iterable

from flwr.app import Message
from flwr.serverapp import Grid

from fedda import models, records
from fedda.config import ModelConfig
from fedda.errors import Code, RosterError
from fedda.settings import Task

from .strategy_modules import mail, roster


def check(grid: Grid, task: Task, nodes: Iterable[roster.Node], wait: float) -> None:
    """Ask sites for the frozen part of a training's network, if it has one.

    A site that gives another answer or none is not judged here: it is asked again in every round.

    Args:
        grid: the way to the sites.
        task: the training.
        nodes: the sites that are connected.
        wait: seconds to wait for answers; a site reads its weights for the first time.

    Raises:
        RosterError: sites do not have the server's weights; the error names them.
    """
    if not models.frozen(task.model):
        return
    names = {node.id: node.name for node in nodes}

    def question(node_id: int) -> Message:
        content = records.write(task=task.flat())
        return Message(content, node_id, "query", ttl=wait, group_id="roster")

    without = [
        names[reply.metadata.src_node_id]
        for reply in mail.Mail(grid).deliver(map(question, names), wait)
        if reply.has_error() and reply.error.code == Code.WEIGHTS
    ]
    if without:
        raise RosterError(_sentence(sorted(without), task.model, task.frozen))


def _sentence(sites: list[str], config: ModelConfig, digest: str) -> str:
    if models.is_file(config.weights):
        remedy = f"start each with --weights and a copy of the server's {config.weights}"
    else:
        remedy = f"run `fedda weights {config.name} {config.weights}` there, which shows the hash"
    one = len(sites) == 1
    return (
        f"{', '.join(sites)} {'does' if one else 'do'} not have the weights '{config.weights}' of "
        f"{config.name} with the server's hash {digest}, which model.train={config.train} needs at "
        f"every site: {remedy}, and begin the run again. {'Its' if one else 'Their'} own log says "
        "what is there instead."
    )
