"""SHOT: its formulas against plain loops, the adaptation, and that sources may leave."""

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn, optim
from torch.nn import functional as F

from clients.shared.side_by_side import groups, parts_of
from clients.site.memory import resident
from fedda import models, records
from fedda.algorithms import shot
from fedda.config import ModelConfig
from fedda.config.inputs import Inputs
from fedda.data import load_source, load_target
from fedda.errors import Code, ConfigError, QuorumError, public
from fedda.maths import class_shares
from fedda.maths.ensemble import Heads, SideBySide, weights_of
from fedda.models import Extension, weight_normed
from fedda.models.export import export
from fedda.train import batches, round_images, seed_for
from tests.federation import Federation
from tests.local_grid import CLASSES, SIDE, SOURCES, Node, ScriptedGrid, reshaped, run, times
from tests.patience import PATIENCE
from tests.reference import shot as twin
from tests.test_model_cache import Forgetful

SHOT: dict[str, Any] = {"method": "shot", "rounds": 4, "shot.epochs": 3, "train.lr": 0.05}
DRAWS = torch.Generator().manual_seed(5)
LOGITS = 3 * torch.randn(12, 4, generator=DRAWS, dtype=torch.float64)
Y = torch.randint(4, (12,), generator=DRAWS)


def close(found: Tensor | float, wanted: Any) -> None:
    found = torch.as_tensor(found)
    torch.testing.assert_close(found, torch.as_tensor(wanted, dtype=found.dtype))


# ---- the formulas ------------------------------------------------------------------------------


def test_information_by_hand() -> None:
    """Sure of two images of two classes: -ln 2; sure of one class: 0; unsure of all: 0."""
    sure = torch.tensor([[40.0, 0.0], [0.0, 40.0]])
    close(shot.information_loss(sure), -math.log(2))
    close(shot.information_loss(sure[:1]), 0.0)
    close(shot.information_loss(torch.zeros(3, 2)), 0.0)
    assert shot.entropy(torch.tensor([1.0, 0.0])) == 0  # and not NaN


def test_shares_by_hand() -> None:
    """A mean of (.5, .5) where (.8, .2) is sought is half of ln .625 + ln 2.5 from it."""
    sure = torch.tensor([[40.0, 0.0], [0.0, 40.0]])
    off = -(math.log(0.8) + math.log(0.2)) / 2 - math.log(2)
    close(shot.information_loss(sure, torch.tensor([0.8, 0.2])), off - math.log(2))
    close(shot.information_loss(sure, torch.tensor([0.5, 0.5])), -math.log(2))
    p = torch.tensor([[0.9, 0.1], [0.7, 0.3]])
    close(class_shares.estimated(p), torch.tensor([1.9, 0.7]) / 2.6)  # .3 of an image more, each
    assert class_shares.estimated(torch.tensor([[1.0, 0.0]] * 99)).min() > 0


@pytest.mark.parametrize(
    ("shares", "found"), [("even", [0, 0, 0]), ("estimated", [1, 1, 1]), ("auto", [0, 0, 1])]
)
def test_shares_are_estimated_where_models_agree(shares: Any, found: list[bool]) -> None:
    options = shot.Config(shares=shares)
    assert [options.estimates(alike) for alike in (None, 0.79, 0.8)] == found


def test_losses_are_those_of_plain_loops() -> None:
    close(shot.information_loss(LOGITS), twin.information(LOGITS.tolist()))
    q = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    close(shot.information_loss(LOGITS, q), twin.information(LOGITS.tolist(), q.tolist()))
    for beta in (0.0, 0.3):
        wanted = twin.objective(LOGITS.tolist(), Y.tolist(), beta)
        close(shot.target_loss(LOGITS, Y, beta), wanted)
    close(shot.target_loss(LOGITS, None, 0.3), twin.information(LOGITS.tolist()))
    smooth = F.cross_entropy(LOGITS, Y, label_smoothing=0.1)
    close(smooth, twin.smooth_cross_entropy(LOGITS.tolist(), Y.tolist(), 0.1))


def test_the_gradient_of_a_very_sure_model_is_finite() -> None:
    logits = torch.tensor([[400.0, 0.0, 0.0], [400.0, 0.0, 0.0]], requires_grad=True)
    shot.target_loss(logits, torch.tensor([1, 2]), 0.3).backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_pseudo_labels_by_hand() -> None:
    """The third point is unsure, and lies near the second: the soft centroids decide."""
    v = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.3, 1.0]])
    p = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.5, 0.5]])
    # mu_0 is (.9 + .15, .1 + .5) / 1.5, mu_1 is (.1 + .15, .9 + .5) / 1.5.
    close(shot.centroids(v, p), torch.tensor([[0.7, 0.4], [0.25 / 1.5, 1.4 / 1.5]]))
    label, mu = shot.pseudo_labels(v, p)
    assert label.tolist() == [0, 1, 1]
    close(mu, torch.tensor([[1.0, 0.0], [0.15, 1.0]]))


def test_how_alike_models_are_by_hand() -> None:
    """Three models of two images: of the first image's three pairs all agree, then one of three."""
    label = torch.tensor([[2, 0], [2, 1], [2, 1]])
    assert class_shares.alike(label) == pytest.approx((1 + 1 / 3) / 2)
    pairs = [(label[i] == label[j]).double().mean() for i, j in ((0, 1), (0, 2), (1, 2))]
    assert class_shares.alike(label) == pytest.approx(float(sum(pairs) / 3))
    assert class_shares.alike(label[:1]) is None


def test_a_class_that_no_image_is_near_to_is_no_label() -> None:
    v = torch.tensor([[1.0, 0.0], [0.9, 0.1]])
    label, mu = shot.pseudo_labels(v, torch.tensor([[0.6, 0.2, 0.2], [0.6, 0.2, 0.2]]))
    assert (mu == 0).all(dim=1).sum() == 2
    assert len(set(label.tolist())) == 1 and mu[label[0]].any()


@pytest.mark.parametrize("form", ["official", "paper"])
def test_pseudo_labels_are_those_of_plain_loops(form: shot.Centroids) -> None:
    for seed in range(20):
        draws = torch.Generator().manual_seed(seed)
        z, logits = (torch.randn(15, n, generator=draws, dtype=torch.float64) for n in (3, 5))
        v, p = shot.points(z, form), (2 * logits).softmax(dim=1)
        plain = [twin.unit_with_one(row) if form == "official" else row for row in z.tolist()]
        close(v, plain)
        label, mu = shot.pseudo_labels(v, p)
        wanted, centroids = twin.labels(plain, p.tolist())
        assert label.tolist() == wanted
        for row, known in zip(mu, centroids, strict=True):
            torch.testing.assert_close(
                row, torch.tensor(known or [0.0] * len(row), dtype=row.dtype), rtol=1e-6, atol=1e-7
            )


def test_the_appended_one_matters_for_short_features() -> None:
    """Without it only the direction counts: a short vector is as far from a long one as any."""
    z = torch.tensor([[0.01, 0.0], [0.0, 0.01], [5.0, 0.0]])
    official, paper = shot.points(z, "official"), shot.points(z, "paper")
    assert official[0] @ official[1] > 0.99 and torch.equal(paper, z)


# ---- models side by side -----------------------------------------------------------------------


def test_models_side_by_side_answer_as_one_by_one() -> None:
    encoders = [nn.Linear(5, 6).double() for _ in range(3)]
    heads = Heads(3, 6, 4, "probabilities").double()
    heads.weight.normal_(generator=torch.Generator().manual_seed(1))
    heads.bias.normal_(generator=torch.Generator().manual_seed(2))
    x = torch.randn(7, 5, dtype=torch.float64)
    z = SideBySide(encoders)(x)
    own = [
        (encoder(x) @ heads.weight[k].T + heads.bias[k]).tolist()
        for k, encoder in enumerate(encoders)
    ]
    close(heads.each(z), own)
    for a in ([1.0, 1.0, 1.0], [0.2, 1.5, -1.0]):
        heads.a.data = torch.tensor(a, dtype=torch.float64)
        w = heads.w.tolist()
        close(sum(w), 1.0)
        heads.mean = "probabilities"
        close(heads(z).softmax(dim=1), twin.mean_probability(own, w))
        heads.mean = "logits"
        close(heads(z).softmax(dim=1), twin.of_mean_logits(own, w))
    # sigmoid(ln 3) is 3/4, sigmoid(0) is 1/2
    close(weights_of(torch.tensor([3.0, 1.0]).log(), "ratio"), [0.6, 0.4])
    assert not [name for name, _ in heads.named_parameters() if name != "a"]  # frozen


def test_a_weight_normed_head_trains_by_length_and_direction() -> None:
    model = models.build(ModelConfig(name="mlp", hidden="6"), (5,), 4, seed=0)
    before = copy.deepcopy(model.state_dict())
    x, y = torch.randn(9, 5), torch.arange(9) % 4
    v, b = model.head.weight.detach().clone(), model.head.bias.detach().clone()
    g = v.norm(dim=1, keepdim=True).requires_grad_()
    v, b, z = v.requires_grad_(), b.requires_grad_(), model.features(x).detach()
    F.cross_entropy(z @ (g * v / v.norm(dim=1, keepdim=True)).T + b, y).backward()
    with torch.no_grad():
        g, v, b = (t - 0.5 * t.grad for t in (g, v, b))  # type: ignore[operator]
        wanted = g * v / v.norm(dim=1, keepdim=True)
    with weight_normed(model):
        optimizer = optim.SGD(model.head.parameters(), lr=0.5)
        torch.testing.assert_close(model(x), model.head(z))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    close(model.head.weight.detach(), wanted)
    close(model.head.bias.detach(), b)
    assert [*model.state_dict()] == [*before] and model.head.weight is not None
    assert "head.weight" in model.fresh


def test_a_failed_training_leaves_the_head_as_it_was() -> None:
    model = models.build(ModelConfig(name="mlp", hidden="6"), (5,), 4, seed=0)
    head, fresh = model.head, model.fresh
    with pytest.raises(ZeroDivisionError), weight_normed(model):
        raise ZeroDivisionError
    assert model.head is head and model.fresh == fresh


# ---- a whole run -------------------------------------------------------------------------------


def loop_of_the_target(
    sources: dict[str, dict[str, Tensor]],
    node: Node,
    rounds: list[int],
    beta: float,
    of: int,
    estimated: bool,
) -> dict[str, models.Model]:
    """Adapt each source's model by itself in a loop of its own, with new labels every 2 steps."""
    site = resident(tuple(sorted(node.items())))
    x = load_target(node["data"], size=SIDE).x.float() / 255
    adapted = {name: loaded(weights) for name, weights in sources.items()}
    q = torch.full((CLASSES,), 1 / CLASSES)
    if estimated:
        said = [models.predict(model, x).sum(dim=0) for model in adapted.values()]
        q = (torch.stack(said).mean(dim=0) + 0.3) / (len(x) + 0.3 * CLASSES)
    for model in adapted.values():
        model.train()
        optimizer = optim.SGD(model.encoder.parameters(), lr=0.05, momentum=0.9)
        for t in rounds:
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * (1 + 10 * (t - rounds[0]) / (of - rounds[0])) ** -0.75
            (share,) = round_images(site.blocks.blocks, t, 1, seed_for(0, "town"))
            found: list[int] = []
            for i, part in enumerate(share.split(16)):
                if i % 2 == 0:
                    model.eval()
                    with torch.no_grad():
                        z = model.features(x)
                        p = model.head(z).softmax(dim=1)
                    found, _ = twin.labels([twin.unit_with_one(r) for r in z.tolist()], p.tolist())
                    model.train()
                logits = model(x[part])
                p = logits.softmax(dim=1)
                each, mean = -(p * p.log()).sum(dim=1).mean(), p.mean(dim=0)
                loss = each + (mean * (mean / (CLASSES * q)).log()).sum()
                loss = loss + beta * F.cross_entropy(logits, torch.tensor(found)[part])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        model.eval()
    return adapted


def loaded(weights: dict[str, Tensor]) -> models.Model:
    """The network of these runs with a source's weights."""
    model = models.build(ModelConfig(name="mlp", hidden="16"), (1, SIDE, SIDE), CLASSES, seed=0)
    model.load_state_dict(weights)
    return model


def sent_models(grid: ScriptedGrid) -> dict[str, dict[str, Tensor]]:
    """The models that the sources sent, by name."""
    found = {}
    for reply in grid.replies:
        name = grid.nodes[reply.metadata.src_node_id]["name"]
        if name in SOURCES and "arrays" in reply.content:
            packed = records.read(reply.content)[0]["model"].unpack()
            found[name] = {n: torch.from_numpy(a.copy()) for n, a in packed.items()}
    return found


def with_state(nodes: list[Node], folder: Path) -> list[Node]:
    """The same sites, with a folder of their own."""
    return [node | {"state-dir": str(folder / "state"), "threads": 1} for node in nodes]


@pytest.mark.parametrize("shares", ["even", "estimated"])
def test_each_model_adapts_as_if_it_were_alone(
    domains: list[Node], tmp_path: Path, shares: str
) -> None:
    nodes = with_state(domains, tmp_path)
    grid = ScriptedGrid(nodes)
    settings = SHOT | {"shot.relabel": 2, "shot.beta": 0.4, "train.schedule": "ganin"}
    settings |= {"run.dir": str(tmp_path / "runs"), "run.name": "alone", "train.momentum": 0.9}
    settings["shot.shares"] = shares
    (training,) = run(nodes, settings, grid=grid)[0]["trainings"]["shot"]
    target = next(node for node in nodes if node["name"] == "town")
    wanted = loop_of_the_target(sent_models(grid), target, [2, 3, 4], 0.4, 4, shares == "estimated")
    file = tmp_path / "state" / training["adapted"]["file"]
    found = load_file(file)
    for k, name in enumerate(SOURCES):
        for entry, value in wanted[name].encoder.state_dict().items():
            torch.testing.assert_close(
                found[f"encoder.members.{k}.{entry}"], value, rtol=1e-4, atol=1e-5
            )
        assert torch.equal(found["head.weight"][k], sent_models(grid)[name]["head.weight"])
    # The file is the ensemble: its prediction is the mean of the models'.
    model, about = models.load(file)
    x = load_target(target["data"], size=SIDE).x
    mean = torch.stack([models.predict(m, x) for m in wanted.values()]).mean(dim=0)
    torch.testing.assert_close(models.predict(model, x), mean, rtol=1e-3, atol=1e-4)
    assert about.extension == Extension(
        "shot", {"models": 3, "mean": "probabilities", "weights": "softmax"}
    )
    assert [round(w, 6) for w in training["rounds"][-1]["weights"].values()] == [0.333333] * 3


def test_a_source_trains_all_epochs_in_its_only_round(domains: list[Node], tmp_path: Path) -> None:
    """Label smoothing, the schedule within the round, and the epochs of a run of 3 rounds."""
    grid = ScriptedGrid(domains)
    settings = SHOT | {"rounds": 2, "shot.smoothing": 0.2, "shot.head": "linear"}
    settings |= {"train.schedule": "linear", "train.lr-end": 0.01, "run.dir": str(tmp_path)}
    settings |= {"train.momentum": 0.9, "run.name": "source"}
    run(domains, settings, grid=grid)
    node = next(node for node in domains if node["name"] == "bert")
    site, data = resident(tuple(sorted(node.items()))), load_source(node["data"], size=SIDE)
    model = models.build(ModelConfig(name="mlp", hidden="16"), (1, SIDE, SIDE), CLASSES, seed=0)
    model.train()
    optimizer = optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    for epoch, rate in ((1, 0.05), (2, 0.03), (3, 0.01)):
        optimizer.param_groups[0]["lr"] = rate
        for part in batches(round_images(site.blocks.blocks, epoch, 1, seed_for(0, "bert")), 16):
            log_p = model(data.x[part].float() / 255).log_softmax(dim=1)
            q = 0.8 * F.one_hot(data.y[part], CLASSES) + 0.2 / CLASSES
            optimizer.zero_grad()
            (-(q * log_p).sum(dim=1).mean()).backward()
            optimizer.step()
    for name, value in sent_models(grid)["bert"].items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("most", [0.0, 0.5])
def test_a_bound_on_the_layers_holds_for_the_head_too(
    domains: list[Node], tmp_path: Path, most: float
) -> None:
    grid = ScriptedGrid(domains)
    settings = SHOT | {"rounds": 2, "shot.epochs": 6, "train.lipschitz": most}
    run(domains, settings | {"run.dir": str(tmp_path)}, grid=grid)
    norms = [torch.linalg.matrix_norm(m["head.weight"], 2) for m in sent_models(grid).values()]
    # A step of the power method follows the norm closely, but not exactly.
    assert [float(norm) < 0.53 for norm in norms] == [most > 0] * 3


def test_no_message_goes_to_a_source_after_the_first_phase(
    domains: list[Node], tmp_path: Path
) -> None:
    """Not for training, and not for a test."""
    grid = ScriptedGrid(domains)
    results, _ = run(domains, SHOT | {"run.dir": str(tmp_path)}, grid=grid)
    assert results["events"] == []
    asked = [c for c in grid.crossed if c.way == "to" and c.kind != "query"]
    assert [c.site for c in asked] == [*SOURCES, "town", *["town", "town"] * 3]
    assert [c.hop for c in asked] == ["train"] * 3 + ["test"] + ["adapt", "test"] * 3
    # The target gets each source's model once, for the first test, and keeps them.
    (training,) = results["trainings"]["shot"]
    sent = [each["bytes"].get("to target model", 0) for each in training["rounds"]]
    assert sent == [training["rounds"][0]["bytes"]["from source model"], 0, 0, 0]


@pytest.mark.parametrize("method", ["shot", "decision", "comda"])
@pytest.mark.parametrize("factor", [0.0, 1e30])
def test_a_source_whose_model_the_target_cannot_use_is_left_out(
    domains: list[Node], tmp_path: Path, method: str, factor: float
) -> None:
    """It answers all images alike, or what are no numbers; the others' models adapt."""
    nodes = [node | {"reproducible": False} for node in with_state(domains, tmp_path)]
    settings = SHOT | {"method": method, f"{method}.epochs": 3, "run.dir": str(tmp_path)}
    settings |= {"rounds": 3, "guard.max-change": 0.0, "guard.max-statistics": 0.0}
    settings |= {"guard.max-update": 0.0}  # else it is scaled to one that can be used
    lie = {"bert": reshaped(lambda model: {n: times(a, factor) for n, a in model.items()})}
    results, events = run(nodes, settings, script=lie)
    (training,) = results["trainings"][method]
    assert [each["weights"].keys() for each in training["rounds"][1:]] == [{"anna", "carl"}] * 2
    said = [(e["site"], e["text"]) for e in events if e.get("what") == "refused"]
    assert said == [("bert", "the target cannot use its model; the target's log says why")]
    assert all("accuracy" in each for each in training["rounds"])

    few = {"run.name": "few", "wait.min-sources": 3, "wait.tries": 1}
    with pytest.raises(QuorumError, match=r"models of 2 sources, but wait.min-sources is 3"):
        run(nodes, settings | few, script=lie)


def test_a_run_from_a_finished_model_needs_no_source(domains: list[Node], tmp_path: Path) -> None:
    first = {"method": "fedavg", "rounds": 4, "run.dir": str(tmp_path), "train.lr": 0.05}
    model = run(domains, first)[0]["trainings"]["fedavg"][0]["model"]
    target = with_state([node for node in domains if node["role"] == "target"], tmp_path)
    settings = SHOT | {"rounds": 2, "run.dir": str(tmp_path / "two"), "run.start-from": model}
    grid = ScriptedGrid(target)
    results, _ = run(target, settings | {"run.expect": 1}, grid=grid)
    (training,) = results["trainings"]["shot"]
    assert [list(each["weights"]) for each in training["rounds"]] == [["town"]] * 2
    file = tmp_path / "state" / training["adapted"]["file"]
    adapted, before = load_file(file), load_file(model)
    assert torch.equal(adapted["head.weight"][0], before["head.weight"])
    moved = {
        n
        for n, v in before.items()
        if n.startswith("encoder.")
        and not torch.equal(v, adapted[n.replace("encoder.", "encoder.members.0.", 1)])
    }
    assert moved == {n for n in before if n.startswith("encoder.")}


def test_a_target_that_lost_its_models_says_so(domains: list[Node], tmp_path: Path) -> None:
    """Without a state directory nothing of them is left after a restart."""

    def forget(request: Any, reply: Any) -> list[Any]:
        resident.cache_clear()
        return [reply]

    grid = ScriptedGrid(domains, {"town": forget})
    settings = SHOT | {"run.dir": str(tmp_path), "wait.tries": 1, "run.evaluate": False}
    with pytest.raises(QuorumError, match=f"town: {re.escape(public(Code.LOST))}"):
        run(domains, settings, grid=grid)


def test_a_target_that_restarts_before_it_adapts_is_sent_the_models_again(
    domains: list[Node], tmp_path: Path
) -> None:
    grid = Forgetful(domains)
    grid.forgets = (2,)
    settings = SHOT | {"rounds": 2, "run.dir": str(tmp_path)}
    (training,) = run(domains, settings, grid=grid)[0]["trainings"]["shot"]
    sent = [each["bytes"]["to target model"] for each in training["rounds"]]
    assert sent[0] == sent[1] == training["rounds"][0]["bytes"]["from source model"]


def test_the_error_names_the_setting() -> None:
    plain = models.build(ModelConfig(name="identity"), (3,), 3, seed=0)
    settings = {"models": 2, "mean": "logits", "weights": "softmax"}
    both = models.blank(ModelConfig(name="identity"), (3,), 3, Extension("shot", settings))
    with pytest.raises(ConfigError, match=r"set model\.bottleneck"):
        groups(both, plain, 0.1)


def test_each_encoder_has_the_rates_of_a_single_model() -> None:
    """In a pretrained network new layers have ten times the rate of the others."""
    config = ModelConfig(name="mlp", hidden="6", bottleneck=4)
    plain = models.build(config, (5,), 3, seed=0)
    plain.pretrained = True
    settings = {"models": 2, "mean": "logits", "weights": "softmax"}
    both = models.blank(config, (5,), 3, Extension("shot", settings))
    names = {id(p): name for name, p in both.named_parameters()}
    rates = {names[id(p)]: g["lr"] for g in groups(both, plain, 0.1) for p in g["params"]}
    assert rates.keys() == {n for n in names.values() if n.startswith("encoder.")}
    assert {n: r for n, r in rates.items() if "bottleneck" in n}
    assert all(rate == (1.0 if "bottleneck" in n else 0.1) for n, rate in rates.items())


@pytest.mark.nightly("fedda/models", "fedda/cli/export.py")
@pytest.mark.parametrize("mean", ["probabilities", "logits"])
def test_models_side_by_side_are_exported(tmp_path: Path, mean: str) -> None:
    """`export` compares the file's answers with those of the models."""
    config = ModelConfig(name="digit-cnn", bottleneck=6)
    added = Extension("shot", {"models": 3, "mean": mean, "weights": "softmax"})
    made = models.build(config, (1, 8, 8), CLASSES, 0, added)
    _, heads = parts_of(made)
    heads.weight.normal_(generator=torch.Generator().manual_seed(3))
    heads.a.data = torch.tensor([0.5, -1.0, 1.0])
    file, classes = tmp_path / "model.safetensors", [str(c) for c in range(CLASSES)]
    models.save(file, made, config=config, inputs=Inputs((1, 8, 8)), classes=classes)
    assert export(file, tmp_path / "model.onnx").difference < 1e-5


# ---- over processes ----------------------------------------------------------------------------


@pytest.mark.nightly("clients/shot.py", "strategies/shot.py", "server/training.py")
def test_the_target_finishes_after_the_sources_have_left(hub: Federation) -> None:
    """Sources end once their models are there; the target adapts as it would have with them."""
    settings = SHOT | {"rounds": 5, "wait.sites": 20.0, "train.batch-size": 16}
    hub.act("town", {"2": ["hold", 0]})  # until the sources are gone
    training = hub.begin("gone", settings)
    training.wait_for("round", round=1)
    hub.processes["town"].wait_for("acting: hold in round 2", PATIENCE)
    for name in SOURCES:
        hub.kill(name)
    hub.act("town", {})
    results = training.finish()
    assert results["events"] == []
    alone = hub.alone("gone", settings)
    for now, then in zip(
        results["trainings"]["shot"][0]["rounds"],
        alone["trainings"]["shot"][0]["rounds"],
        strict=True,
    ):
        assert now["loss"] == then["loss"] and now["accuracy"] == then["accuracy"]
    file = results["trainings"]["shot"][0]["adapted"]["file"]
    live = load_file(hub.directory / "state" / "town" / file)
    here = load_file(hub.directory / "alone" / "gone" / file)
    assert live.keys() == here.keys() and all(live[n].equal(here[n]) for n in here)
