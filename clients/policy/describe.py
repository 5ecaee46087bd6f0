"""A site's policy in plain words, and the file that `fedda policy init` writes."""

from collections.abc import Iterator

from .budget import Spent
from .rules import SPARE, Names, Policy, named

IMAGES = '["digit-cnn", "resnet*", "efficientnet*"]'
VECTORS = '["identity", "mlp"]'
FRESH = """\
# What this site lets a server do. `fedda-client --policy FILE` reads this file when it starts.
#
# The server cannot change it. A request that is not allowed is refused before any work; the server
# learns only that the policy refused it, and this site's log says why. A key that is left out does
# not restrict anything, but for plugins, of which only those that are named are used, sums that
# hide models, and `fedda look`, which is not answered. `fedda policy check FILE`
# says in plain words what the file allows.

[allow]                      # names; * stands for any text
methods = ["*"]              # for example ["fedavg", "kd3a"]; `fedda methods` lists them
# Convolutional networks whose layers all have BatchNorm, which mixes the images of a step. Layers
# without it, as in lenet, alexnet, identity and, for vectors, a head alone, can be made to show
# single images by a server that moves the model a little in each round. `fedda policy init
# --vectors` adds identity and mlp, which tables of numbers need.
networks = ["digit-cnn", "resnet*", "efficientnet*"]
# "batch" sends moments of this site's images, of a target's, too: means that nearly tell how
# frequent each class is here. ["group"] sends none, but mixes no images either; it refuses runs
# without model.norm=group.
norms = ["*"]
phases = ["*"]               # of methods: `fedda methods --wire` names them
plugins = []                 # code of other packages; `fedda policy plugins` writes this line

[limits]                     # the largest model that a request may name
image-side = 512             # pixels
classes = 40                 # that all sites have together; each is a row of the head
parameters = 100_000_000     # values of the model, and of all that the method adds
views = 8                    # augmented views of each image that a frozen network computes
hidden = 512                 # units of a layer between network and head

[leaving]                    # what may leave this site
models = true
# A model that learnt what models said which the server sent in the open (KD3A without a seal,
# FACT), or a target's that learnt of atoms or means: where a server makes these up, a step shows
# single images. With --key and --peers at all sites KD3A's come sealed, and this may stay false.
taught = false
# FedDaDiL's points: each goes straight to one example, so a server computes features of more than
# half of a site from one round, and other sites can from the mean. true where all may know them.
atoms = false
# Means of a target's inputs per predicted class; one answer a training. In two, with models that
# differ about one example, a server can subtract: true where you trust it, or with protect.noise.
statistics = false
# Gradients of discriminators, as in f-DANN and FADA: from sums that a server makes up it reads the
# features of a third of a site in one round. true where you trust it, or with protect.noise.
gradients = false
tests = true                 # the numbers of tests, such as the accuracy
# After the last round, how many tests of each class the model takes for which, in tens; no cell of
# fewer than 10 is told. It also tells how frequent each class is among the tests.
classes = true
# What `fedda look` asks for before any training: examples and classes in tens, and of each column
# or channel, over 64 examples or more, range, mean, deviation, gaps and a histogram. Told as
# often as budget.looks says; protect.noise hides more.
look = false

[protect]                    # the stricter of this, the run and the command line holds
min-images = 64              # least images of a round and of each of its steps
min-examples = 256           # least examples that a gradient is summed over
clip = 10.0                  # largest norm of a gradient
noise = 0.0                  # least noise on a gradient, in multiples of that norm, and on means
test-noise = 0.0             # noise on the numbers of tests, in units of their range

[budget]                     # over all runs of all servers, kept in STATE_DIR/budget.db
rounds = 1000                # requests to train; in some methods a round is two
tests = 1000                 # models to test
trainings = 20               # different trainings: methods, seeds, settings
megabytes = 100_000          # that leave this site
looks = 1                    # answers to `fedda look`; two together can tell an example

[secure]                     # models and gradients of which the server sees only a sum
demand = false               # true: they leave in no other way
least = 3                    # least sites in such a sum, this one included
pairs = false                # true: gradients also in sums of two, who know each other's
changes = 0                  # how often the group may change, over all runs: 2 for each drop-out

[privacy]                    # of each labelled example, by noise on the steps of training
noise = 0.0                  # least noise of a step; 0: a run may go without
# epsilon = 8.0              # the most that all runs spend together; then none goes without noise
delta = 1e-5                 # at which epsilon is computed; below one over the number of examples

[times]                      # when this site answers, in its local time; empty: always
hours = []                   # for example ["mon-fri 20:00-06:00", "sat-sun 00:00-24:00"]

[keep]                       # on this site's own disk
notes = true                 # features and confusion matrices of trainings, which are never sent
megabytes = 4000             # of all that trainings leave behind

[audit]                      # what `fedda audit all --policy FILE` may find; no request is refused
images = 0.1                 # of the images of a step over min-images or more, recovered
membership = 0.1             # of the members, found at one in a thousand false
shares = 1.0                 # of what guesses do not know of the class shares; 1: any
"""


def fresh(classes: int, vectors: bool) -> str:
    """The file that `fedda policy init` writes.

    Args:
        classes: the most that runs may name.
        vectors: whether the site's data are vectors or tables of numbers.
    """
    text = FRESH.replace("classes = 40  ", f"classes = {classes:<4}", 1)
    return text.replace(IMAGES, VECTORS, 1) if vectors else text


def words(policy: Policy) -> Iterator[str]:
    """Say what a policy allows, one sentence at a time."""
    allow, limits, protect = policy.allow, policy.limits, policy.protect
    yield f"Methods: {_names(allow.methods)}. Phases: {_names(allow.phases)}."
    others = f"Code of other packages: {_names(allow.plugins)}."
    yield others if allow.plugins else "Code of other packages is not used."
    yield f"Networks: {_names(allow.networks)}, with {limits.parameters:,} values at most."
    told = "; BatchNorm's moments nearly tell how frequent each class is here"
    yield f"Normalisation: {_names(allow.norms)}{told * named('batch', allow.norms)}."
    more = f"{SPARE} more classes than are here" if limits.classes is None else ""
    classes = more or f"{limits.classes:,} classes"
    yield f"Images of {limits.image_side} pixels a side at most, and {classes}."
    yield f"A frozen network computes {limits.views} views of each image at most."
    yield f"A layer between network and head has {limits.hidden:,} units at most."
    kinds = policy.leaving.model_dump()
    may, not_ = ([k for k, v in kinds.items() if v is yes] for yes in (True, False))
    called = {"tests": "numbers of tests", "look": "what the data look like (`fedda look`)"}
    called["classes"] = "answers to tests by class, in tens"
    called["taught"] = "models that learnt from others sent in the open"
    yield f"May leave: {', '.join(called.get(k, k) for k in may)}."
    if not_:
        yield f"Never leave: {', '.join(called.get(k, k) for k in not_)}."
    yield f"A model is trained on {protect.min_images} images or more, in a round and in each step."
    clip = "" if protect.clip is None else f", of a norm of {protect.clip:g} at most"
    noise = f", with noise of {protect.noise:g} times that norm" if protect.noise else ""
    yield f"A gradient is summed over {protect.min_examples} examples or more{clip}{noise}."
    if protect.test_noise:
        yield f"Numbers of tests carry noise of {protect.test_noise:g} of their range."
    most = policy.budget
    yield (
        f"In all: {_most(most.rounds)} requests to train, {_most(most.tests)} models to test, "
        f"{_most(most.trainings)} different trainings, and {_most(most.megabytes)} MB that leave."
    )
    secure = policy.secure
    yield (
        f"{'All models leave' if secure.demand else 'Models may leave'} under masks or sealed to "
        f"the target; a sum is over {secure.least} sites or more"
        f"{', of gradients also over 2' * secure.pairs}, and its group may change "
        f"{secure.changes} times."
    )
    privacy = policy.privacy
    noise = f"at least {privacy.noise:g} times the clip" if privacy.noise else "as the run asks"
    if privacy.demanded and not privacy.noise:
        noise = "as the run asks, but more than 0"
    epsilon = "any" if privacy.epsilon is None else f"{privacy.epsilon:g} at most"
    yield (
        f"Noise on steps of training: {noise}; all noisy runs together spend an epsilon of "
        f"{epsilon}, at a delta of {privacy.delta:g}."
    )
    if privacy.demanded:
        yield (
            "Nothing else leaves that depends on labelled training images: only DP-SGD's models, "
            "and tests on labelled test files. A target's images have no labels, and no noise."
        )
    hours = policy.times.hours
    yield f"Requests are answered {'at ' + ', '.join(hours) if hours else 'at any time'}."
    room = 16_000 if policy.keep.megabytes is None else policy.keep.megabytes
    notes = "with" if policy.keep.notes else "without"
    limits = {k: v for k, v in policy.audit.model_dump().items() if v is not None}
    if limits:
        found = ", ".join(f"{k} {v:g}" for k, v in limits.items())
        yield f"An audit may find at most: {found}."
    yield f"Trainings may leave {room:,g} MB on this site's disk, {notes} notes."


def left(policy: Policy, spent: Spent) -> Iterator[tuple[str, str, str]]:
    """What was used of each budget -> its name, what was used, and what it is."""
    most, used, privacy = policy.budget, spent.used(), policy.privacy
    yield "requests to train", f"{used.rounds:,}", _most(most.rounds)
    yield "models to test", f"{used.tests:,}", _most(most.tests)
    yield "different trainings", f"{used.trainings:,}", _most(most.trainings)
    yield "looks", f"{used.looks:,}", _most(most.looks)
    yield "MB that left", f"{used.bytes / 1e6:,.3f}", _most(most.megabytes)
    yield "epsilon of noisy runs", f"{spent.epsilon(privacy.delta):.3g}", _most(privacy.epsilon)


def _names(patterns: Names) -> str:
    return "any" if "*" in patterns else ", ".join(patterns) or "none"


def _most(limit: float | None) -> str:
    return "any number of" if limit is None else f"{limit:,g}"
