"""Offers become a roster, or an error that lists every one of them."""

from typing import Any

import pytest

from fedda import __version__
from fedda.config import InputConfig
from fedda.errors import RosterError
from fedda.results import sofar
from fedda.results.story import tell
from fedda.settings import RunConfig
from server.journal import Journal
from server.summary import summarise
from strategies.sites.roster import OFFER, Node, Roster, form


def offer(name: str, role: str = "source", **change: Any) -> dict[str, Any]:
    return {
        "role": role,
        "name": name,
        "examples": 50,
        "tested": 0,
        "classes": ["cat", "dog"] if role == "source" else [],
        "shape": [1, 8, 8],
        "columns": [],
        "version": __version__,
        "keys": False,
    } | change


def nodes(*offers: dict[str, Any]) -> list[Node]:
    return [Node.read(i, o) for i, o in enumerate(offers, start=11)]


ANNA, BERT = offer("anna"), offer("bert", examples=70)
TOWN = offer("town", "target", tested=9)


def test_a_roster_has_sources_by_name_and_the_target_last() -> None:
    roster = form(nodes(TOWN, BERT, ANNA))
    assert [n.name for n in roster.nodes] == ["anna", "bert", "town"]
    assert [n.id for n in roster.sources] == [13, 12]
    assert roster.target.id == 11 and roster.target.tested == 9
    assert roster.classes == ("cat", "dog")
    assert roster.shape == (1, 8, 8)
    assert roster.counts == {"anna": 50, "bert": 70, "town": 50}
    assert roster.by_id(12) == roster.sources[1] and roster.by_id(99) is None


REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "nobody": ([], "there is no source"),
    "no source": ([TOWN], "there is no source; add a site with labels (fedda-client"),
    "no target": ([ANNA, BERT], "there is no target; add one without labels (fedda-client"),
    "one name of targets": ([ANNA, TOWN, offer("town", "target")], "'town' is the name of two"),
    "one name": ([ANNA, BERT, offer("anna"), TOWN], "'anna' is the name of two sites"),
    "versions": ([ANNA, offer("bert", version="0.0.9"), TOWN], "different versions of fedda"),
    "classes": ([ANNA, offer("bert", classes=["Dog", "cat"]), TOWN], "the same name"),
    "vectors": ([offer("anna", shape=[400]), offer("bert", shape=[300]), TOWN], "equally long"),
    "columns": (
        [
            offer("anna", shape=[2], columns=["age", "chol"]),
            offer("town", "target", shape=[2], columns=["age", "cholesterol"]),
        ],
        "beside anna, town has the columns 'cholesterol', and lacks 'chol'",
    ),
    "columns in another order": (
        [
            offer("anna", shape=[2], columns=["age", "chol"]),
            offer("town", "target", shape=[2], columns=["chol", "age"]),
        ],
        "town has the columns in another order: 'chol', 'age', not 'age', 'chol'",
    ),
    "vectors and images": ([offer("anna", shape=[400]), TOWN], "have different shapes"),
    "colours": ([ANNA, offer("bert", shape=[3, 8, 8]), TOWN], "set input.channels to 1 or 3"),
    "sizes": ([ANNA, offer("bert", shape=[1, 9, 9]), TOWN], "different sizes; set input.size"),
    "not square": (
        [offer(n, r, shape=[1, 8, 9]) for n, r in (("anna", "source"), ("town", "target"))],
        "8x9, not square; set input.size",
    ),
    "mixed sizes": (
        [offer(n, r, shape=[1, 0, 0]) for n, r in (("anna", "source"), ("town", "target"))],
        "different sizes; set input.size",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_error_about_offers_lists_all_of_them(case: str) -> None:
    offers, message = REFUSED[case]
    with pytest.raises(RosterError) as error:
        form(nodes(*offers))
    first, *lines = str(error.value).splitlines()
    assert message in first
    assert len(lines) == max(len(offers), 1)
    for given in offers:
        assert sum(f"{given['name']}: {given['role']}" in line for line in lines) >= 1
    if not offers:
        assert "no site has joined" in lines[0]


def test_every_target_has_a_roster_of_its_own() -> None:
    village = offer("village", "target", examples=20)
    roster = form(nodes(village, BERT, TOWN, ANNA))
    assert [n.name for n in roster.nodes] == ["anna", "bert", "town", "village"]
    assert [n.name for n in roster.targets] == ["town", "village"]
    for target, aim in zip(roster.targets, roster.aims(), strict=True):
        assert [n.name for n in aim.nodes] == ["anna", "bert", target.name]
        assert aim.target == target and aim.several
        assert (aim.counts, aim.shape, aim.classes) == (roster.counts, roster.shape, roster.classes)
    (chosen,) = roster.aims("village")
    assert chosen.target.name == "village" and chosen.several
    with pytest.raises(RosterError, match=r"No target is called 'city'.*one of town, village"):
        roster.aims("city")
    (alone,) = form(nodes(BERT, TOWN, ANNA)).aims()
    assert alone.target.name == "town" and not alone.several


def test_images_are_brought_to_one_shape() -> None:
    mixed = nodes(ANNA, offer("bert", shape=[3, 9, 9]), offer("town", "target", shape=[1, 0, 0]))
    assert form(mixed, InputConfig(channels=3, size=32)).shape == (3, 32, 32)
    gray = nodes(ANNA, offer("town", "target", shape=[1, 8, 9]))
    assert form(gray, InputConfig(size=16)).shape == (1, 16, 16)
    colours = nodes(ANNA, offer("town", "target", shape=[3, 8, 8]))
    assert form(colours, InputConfig(channels=1)).shape == (1, 8, 8)
    vectors = nodes(offer("anna", shape=[400]), offer("town", "target", shape=[400]))
    assert form(vectors, InputConfig(channels=3, size=32)).shape == (400,)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"role": "source"},
        offer("anna", "admin"),
        ANNA | {"labels": [1, 2]},
        ANNA | {"examples": "many"},
        ANNA | {"examples": 0},
        ANNA | {"examples": -5},
        ANNA | {"tested": -1},
        ANNA | {"classes": 5},
        ANNA | {"examples": float("inf")},
        ANNA | {"shape": ["a"]},
        ANNA | {"shape": []},
        ANNA | {"shape": [1, 8]},
        ANNA | {"shape": [1, -8, -8]},
        ANNA | {"version": "0.1\x1b[2J"},
        ANNA | {"version": "1" * 65},
        ANNA | {"name": ""},
        ANNA | {"name": "a/b"},
        ANNA | {"name": "a\nb"},
        ANNA | {"name": "\x1b[2J"},
        ANNA | {"name": "a" * 65},
    ],
)
def test_an_invalid_offer_is_refused(answer: dict[str, Any]) -> None:
    with pytest.raises(RosterError, match=r"Node 7 |anna offers") as error:
        Node.read(7, answer)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("shape", "columns"),
    [
        ([2], ["age", "chol", "salt"]),
        ([1, 8, 8], ["age"]),
        ([2], ["age", "age"]),
        ([2], ["age", "\x1b[2Jchol"]),
        ([2], ["age", ""]),
        ([300_000], [f"column {n}" for n in range(300_000)]),
    ],
)
def test_names_of_columns_that_no_site_would_send_are_refused(
    shape: list[int], columns: list[str]
) -> None:
    with pytest.raises(RosterError, match=f"^anna names {len(columns)} columns") as caught:
        Node.read(11, offer("anna", shape=shape, columns=columns))
    assert str(caught.value).isprintable()


def test_an_offer_has_exactly_the_known_keys() -> None:
    assert set(ANNA) == OFFER


def test_a_site_that_comes_back_under_another_id_is_recognised() -> None:
    known = form(nodes(ANNA, BERT, TOWN))
    again = known.updated([Node.read(99, ANNA), Node.read(50, offer("stranger"))])
    assert [n.id for n in again.nodes] == [99, 12, 13]
    assert again.counts == known.counts
    with pytest.raises(RosterError, match=r"(?s)another offer: anna.*50 examples.*5000 examples"):
        known.updated([Node.read(99, offer("anna", examples=5000))])


def test_no_site_can_take_the_place_of_a_connected_one() -> None:
    known = form(nodes(ANNA, BERT, TOWN))
    again = nodes(ANNA, offer("town", examples=70), TOWN)  # bert's node now claims to be the target
    posing = Node.read(again[1].id, TOWN)
    assert known.updated([again[0], posing, again[2]]) == known
    assert known.updated(again) == known  # nor can a changed offer end the run
    assert known.updated([again[0], posing]).target.id == posing.id  # the target has left
    # Another server gives nodes new ids, so an id that now belongs to another site means nothing.
    moved = [Node.read(12, ANNA), Node.read(11, BERT), Node.read(13, TOWN)]
    assert [n.id for n in known.updated(moved).nodes] == [12, 11, 13]


def test_a_claim_of_many_examples_is_bounded() -> None:
    claims = {"anna": 50, "bert": 60, "carl": 10**9}
    known = form(nodes(*(offer(n, examples=c) for n, c in claims.items()), TOWN))

    def counts(roster: Roster) -> list[int]:
        return [roster.counts[n] for n in claims]

    assert counts(known.bounded(5)) == [50, 60, 300]  # five times the median of the others
    assert counts(known.bounded(0)) == [50, 60, 10**9]
    assert known.bounded(5).sources[2].examples == 10**9  # the claim itself is kept
    told = summarise(RunConfig(), known.bounded(5), {}, Journal())["sites"]
    assert [site["examples"] for site in told] == [*claims.values(), 50]  # and said
    held = {"nodes": told, "counts": known.bounded(5).counts}
    assert sofar.results(tell((), None), "r", {"method": "kd3a"}, held, {})["sites"] == told


def test_a_claim_of_few_examples_makes_nobody_else_count_less() -> None:
    claims = {"anna": 600, "bert": 500, "carl": 1}
    known = form(nodes(*(offer(n, examples=c) for n, c in claims.items()), TOWN))
    assert [known.bounded(2).counts[n] for n in claims] == [600, 500, 1]
    assert known.counted(known.sources, 2) == claims


def test_of_two_sources_the_larger_cannot_raise_its_own_bound() -> None:
    bounded = form(nodes(offer("anna", examples=50), offer("bert", examples=500), TOWN)).bounded(5)
    assert bounded.counts["anna"] == 50 and bounded.counts["bert"] == 250


def test_classes_of_sources_are_united_by_name() -> None:
    """Also in another order; a name that differs in case or spaces is one by mistake."""
    for theirs, all_of_them in (
        (["dog", "cat"], ("cat", "dog")),
        (["cat", "fox"], ("cat", "dog", "fox")),
        (["fox"], ("cat", "dog", "fox")),
    ):
        joined = form(nodes(offer("anna"), offer("bert", classes=theirs), TOWN))
        assert joined.classes == all_of_them
        assert joined.without("anna").classes == all_of_them
        assert Roster.parse(joined.text()).classes == all_of_them
    with pytest.raises(RosterError, match=r"'dog' and bert 'Dog '"):
        form(nodes(offer("anna"), offer("bert", classes=["cat", "Dog "]), TOWN))


def test_a_source_lacks_what_two_others_have() -> None:
    carl = offer("carl", classes=["dog", "owl"])
    roster = form(nodes(ANNA, BERT, carl, TOWN))
    assert roster.lacking() == {"carl": ["cat"]} and roster.alone() == {"carl": ["owl"]}
    assert form(nodes(ANNA, BERT, TOWN)).lacking() == {}


def test_a_source_cannot_make_every_model_as_large_as_it_likes() -> None:
    def naming(count: int) -> dict[str, Any]:
        return offer("carl", classes=["cat", *(f"c{i}" for i in range(count))])

    assert len(form(nodes(ANNA, naming(1000), TOWN)).classes) == 1002
    with pytest.raises(RosterError, match=r"carl alone names 1001 classes.*run.sources"):
        form(nodes(ANNA, naming(1001), TOWN))
    many = [f"c{i}" for i in range(2000)]  # what others name, too, is not made up
    shared = [offer(name, classes=many) for name in ("anna", "bert")]
    assert len(form(nodes(*shared, TOWN)).classes) == 2000
    with pytest.raises(RosterError, match="up to 256 characters"):
        nodes(offer("carl", classes=["x" * 257]))
