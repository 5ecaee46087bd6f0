"""How large a request may be, by all else that it says."""

import pytest
from flwr.app import ConfigRecord

from clients import app
from fedda.records import arrays_of
from tests.local_grid import Bench, Node


@pytest.mark.usefixtures("fresh_sites")
def test_what_a_requests_arrays_may_have_follows_from_its_settings(domains: list[Node]) -> None:
    made = Bench(domains, "kd3a")
    made.round()
    asked = [request for request in made.grid.requests if "step" in request.content]
    for request in asked:
        node = made.grid.nodes[request.metadata.dst_node_id]
        size = sum(len(array.data) for array in arrays_of(request.content))
        # A target may get a teacher for each site of the run, itself included.
        assert size <= app.most_bytes(request, node) <= 2 * size
        task = request.content["task"]
        assert isinstance(task, ConfigRecord)
        task["method"] = "none"
        assert app.most_bytes(request, node) == 0
    assert len(asked) == len(domains)
