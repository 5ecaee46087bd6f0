"""KD3A's clients: sources train on labels, the target on what its teachers agree on.

Feng et al., ICML 2021, https://arxiv.org/abs/2011.09757, algorithm 1.
"""

import logging

import numpy as np
import torch
from torch import Tensor

from fedda import models
from fedda.algorithms import kd3a
from fedda.data import Unlabelled
from fedda.errors import ConfigError, FewImagesError, WireError
from fedda.maths import mixup
from fedda.maths.moments import batchnorm_distance, batchnorm_mmd_loss, mix_moments
from fedda.models import Model, batchnorms, evaluating, inputs_of
from fedda.wire import LOSS, Rule
from fedda.wire.packing import Arrays, Packed

from . import fedavg
from .base import Client
from .site import boundary, output_privacy
from .site.request import Numbers
from .site.sealed import Received
from .site.state import SiteState

Moments = list[tuple[Tensor, Tensor]]  # running mean and variance, layer by layer

logger = logging.getLogger("fedda.site")

CHUNK = 8192  # images voted on at a time: bounds the memory of the vote, not its result


class Past:
    """The last round's alpha by site, of which `kd3a.smoothing` keeps a share."""

    def __init__(self) -> None:
        self.alpha: dict[str, float] = {}

    def state_dict(self) -> SiteState:
        """Return the state from which the next round continues."""
        return SiteState(about=dict(self.alpha))

    def load_state_dict(self, kept: SiteState, device: torch.device) -> None:
        """Continue from a state that `state_dict` returned."""
        self.alpha = dict(kept.about)


Source = fedavg.Source


class Target(Client):
    """Lets the teachers vote, distils the vote, and reports what each source added to it.

    With `kd3a.relay=sealed` it also weighs and averages the models, as in the paper.
    """

    data: Unlabelled

    _mean: Arrays | None = None

    def outgoing(self) -> dict[str, Packed]:
        """Return the trained model, or where this site averages the mean, in full precision."""
        mean = self._mean
        return super().outgoing() if mean is None else {"model": self.packed(mean, "float32")}

    def distil(self) -> Numbers:
        """Lines 7 to 11."""
        request, options, g = self.request, self.options, self.options.gate
        gate = kd3a.gate(request.round, request.task.rounds, g.low, g.high, g.reach)
        sources = boundary.received(self.site, request, "teacher")
        images = torch.cat(self.shares()).unique()  # sorted; a round may use only part of all
        p, about, moments = self.teach(sources.models, images)  # (N, K, C)
        if (own := self.site.taught(self.task)) is not None:  # a teacher that is no site
            p = torch.cat([p, own[images][:, None]], dim=1)
        names, N = list(moments), len(images)
        sources.leave_out([name for name in sources.models if name not in moments])

        consensus, focus = [], torch.zeros(p.shape[1], dtype=torch.float64)
        for part in p.split(CHUNK):
            consensus.append(kd3a.knowledge_vote(part, gate, options.vote))
            if options.weighting == "focus":
                focus += kd3a.consensus_focus(part, gate, options.vote, options.focus)
        vote, weight = (torch.cat([getattr(c, k) for c in consensus]) for k in ("p", "n"))
        heard = torch.cat([c.kept for c in consensus])

        numbers = self.follow(images, vote, weight, heard)
        numbers["loss"] = self.privatise(LOSS, numbers["loss"], N)
        numbers["kept"] = self.privatise(kd3a.KEPT, float(heard.float().mean()), N)
        if options.weighting == "focus":  # per image; only its proportions matter
            if own is not None:
                focus = self._of_sources(focus, p, gate)
            for name, value in zip(names, focus.tolist(), strict=True):
                about[f"focus/{name}"] = self.privatise(kd3a.FOCUS, value / N, N)
        # As they leave, or would without a seal, so that server and site weigh by the same numbers.
        plain = Rule(numbers=kd3a.TOLD)
        numbers, about = (
            output_privacy.quantise(numbers, plain),
            output_privacy.quantise(about, plain),
        )
        updated = options.teacher_batchnorm == "updated"
        alpha = self.weigh(numbers | about, sources) if updated or sources.sealed else {}
        if updated:
            self.mix_statistics(alpha, moments)
        told = numbers | {f"refused/{name}": 1 for name in sources.refused}
        return told | (self.average(alpha, sources) if sources.sealed else about)

    def _of_sources(self, focus: Tensor, p: Tensor, gate: float) -> Tensor:
        """The focus of all teachers but this site's own, which is the last -> (K,).

        It is zero, so that examples weigh the sources, where these alone are sure of too few
        images: where a source is sure of one and the own teacher of all, that one would decide.
        """
        share = float(focus[-1] / focus.clamp(min=0).sum().clamp(min=1e-9))
        logger.info("the focus of the teacher at this site: %.0f %%", 100 * share)
        votes = (kd3a.knowledge_vote(x[:, :-1], gate, self.options.vote) for x in p.split(CHUNK))
        kept = float(torch.cat([vote.kept for vote in votes]).float().mean())
        return focus[:-1] * kd3a.is_focused(self.options, kept)

    def weigh(self, numbers: Numbers, sources: Received) -> dict[str, float]:
        """Lines 10 to 12: alpha by site, this one first, for the sources whose models are used.

        Raises:
            WireError: the request does not say on how many examples they were trained.
        """
        own, options, past = self.site.name, self.options, Past()
        if not sources.sealed:
            used, past_alpha = (
                {own, *sources.models},
                boundary.by_site(self.request.numbers, "past"),
            )
            examples = {n: sources.examples.get(n, 0) for n in used}
            if unknown := sorted(n for n, N in examples.items() if N < 1):
                raise WireError(f"The request does not say how many examples {unknown[0]} has.")
            before = {n: w for n, w in past_alpha.items() if n in used}
            return kd3a.site_weights(options, examples, own, numbers, before)
        # Not from the server: it could give one source all the weight, and read its model.
        if options.smoothing:
            self.register_state("alpha", past)
        most = int(self.request.numbers["most"])
        examples = {own: min(self.site.examples, most)} | sources.examples
        before = {n: w for n, w in past.alpha.items() if n in examples}
        alpha = kd3a.site_weights(options, examples, own, numbers, before)
        past.alpha |= alpha  # a site that is away keeps its last weight
        return alpha

    def average(self, alpha: dict[str, float], sources: Received) -> Numbers:
        """Line 13 -> what the server is told of it."""
        models = [self.packed_model(), *sources.models.values()]
        self._mean = kd3a.mix([m.unpack() for m in models], list(alpha.values()), self.options)
        return {f"alpha/{name}": weight for name, weight in alpha.items()}

    @torch.no_grad()
    def teach(
        self, teachers: dict[str, Packed], images: Tensor
    ) -> tuple[Tensor, Numbers, dict[str, Moments]]:
        """Return teachers' probabilities (N, K, C), the weighting's numbers, the statistics.

        Only one teacher at a time is on the device, however many there are. A teacher is left out
        if its answers would let the numbers be about few images; with noise on tests, it is unsure.

        Raises:
            WireError: no teacher is left.
        """
        weighting, N = self.options.weighting, len(images)
        teacher = self.workspace.hold("teacher", self.workspace.blank)
        p: list[Tensor] = []
        about: Numbers = {}
        moments: dict[str, Moments] = {}
        for name, packed in teachers.items():
            models.load_arrays(teacher, packed.unpack())
            try:
                distance = self._distance(teacher, images) if weighting == "h-divergence" else None
                p.append(self.checked(self._probabilities(teacher, images), teaches=True))
            except WireError as error:
                logger.error("the model of %s is not used: %s", name, error)
                continue
            if distance is not None:
                about[f"distance/{name}"] = self.privatise(kd3a.DISTANCE, distance, N)
            moments[name] = _statistics(teacher)  # after the vote, which may have moved them
        if not p:
            raise FewImagesError("None of the sources' models can be used to teach; see above.")
        return torch.stack(p, dim=1), about, moments

    def follow(self, images: Tensor, p: Tensor, n: Tensor, heard: Tensor) -> Numbers:
        """Line 9: n_i KL(p_i || q(x_i)) under mixup.

        If the teachers are heard on fewer images than the site lets a step be over, n_i is for all
        as if nobody was: else the model would show these few.
        """
        if heard.sum() < self.site.least_batch:
            n = torch.full_like(n, float(n.min()))
        options, draws = self.options, self.generator("mixup")
        beta = np.random.default_rng(draws.initial_seed())

        def loss(indices: Tensor) -> Tensor:
            row = torch.searchsorted(images, indices)
            x, p_i, n_i = self.inputs(indices), p[row].to(self.device), n[row].to(self.device)
            if options.mixup:
                lam = float(beta.beta(options.mixup, options.mixup))
                perm = torch.randperm(len(row), generator=draws).to(self.device)
                x, p_i, n_i = mixup.mixup(x, p_i, n_i, lam, perm, options.mixup_weights)
            return kd3a.distillation_loss(self.model(x), p_i, n_i)

        return self.minimise(loss)

    @torch.no_grad()
    def mix_statistics(self, alpha: dict[str, float], moments: dict[str, Moments]) -> None:
        """Line 13 for BatchNorm's statistics alone, before it is done for all other values.

        The teachers' statistics have changed here, during the vote. Mixed, they fit into the model
        that goes back anyway. Sent one by one, they would need one more model per source.
        """
        everyone = {self.site.name: _statistics(self.model), **moments}
        weights = torch.tensor([alpha[name] for name in everyone], dtype=torch.float64)
        form = "linear" if self.options.batchnorm == "linear" else "moments"
        for layer, *of_sites in zip(
            batchnorms(self.model).values(), *everyone.values(), strict=True
        ):
            means, variances = (torch.stack(part) for part in zip(*of_sites, strict=True))
            mu, var = mix_moments(means, variances, weights, form)
            layer.running_mean.copy_(mu)  # type: ignore[union-attr]
            layer.running_var.copy_(var)  # type: ignore[union-attr]

    def match_moments(self) -> Numbers:
        """Line 16, eq. 12: train the mean so that its features match the sites' moments.

        sum_k alpha_k |mu - mu_k|^2 is |mu - sum_k alpha_k mu_k|^2 plus a constant. The mean that
        came has sum_k alpha_k mu_k as its running statistics, so nothing else is needed.
        """
        layers = list(batchnorms(self.model).values())
        if not layers:
            return {"loss": 0.0, "steps": 0}
        wanted = _statistics(self.model)
        mu = [mean[None] for mean, _ in wanted]
        second = [(var + mean**2)[None] for mean, var in wanted]
        one = torch.ones(1, device=self.device)

        def loss(indices: Tensor) -> Tensor:
            with inputs_of(layers) as seen:
                self.model(self.inputs(indices))
                mu_T, second_T = zip(*(_moments(seen[layer]) for layer in layers), strict=True)
            return batchnorm_mmd_loss(mu_T, second_T, mu, second, one)

        # Always a fresh optimizer: the momentum that is carried over belongs to the distillation.
        numbers = self.minimise(loss, self.optimizer(carried=False))
        for layer, (mean, var) in zip(layers, wanted, strict=True):
            layer.running_mean, layer.running_var = mean, var
        return numbers

    def _probabilities(self, model: Model, images: Tensor) -> Tensor:
        """One teacher's class probabilities, with the statistics the options ask for -> (N, C)."""
        x = self.data.x
        if self.options.teacher_batchnorm == "running":
            return torch.cat([models.predict(model, x[part]) for part in images.split(256)])
        # In random order: a file may hold class after class, and the statistics of a batch of one
        # class say little. A last batch of one image has no statistics, so it joins another.
        order = torch.randperm(len(images), generator=self.generator("vote"))
        parts = self.split([images[order]])
        if self.options.teacher_batchnorm == "updated":
            p = torch.cat([_moving(model, self.inputs(part)) for part in parts])
        else:
            with models.batch_statistics(model):
                p = torch.cat([models.predict(model, x[part], len(part)) for part in parts])
        return p[order.argsort()]

    def _distance(self, teacher: Model, images: Tensor) -> float:
        """Eq. 11 between a source's BatchNorm statistics and the target's, per channel.

        The paper sums over channels; exp(-sum) of a few hundred would choose a single source.

        Raises:
            ConfigError: the model has no BatchNorm.
        """
        layers = list(batchnorms(teacher).values())
        if not layers:
            raise ConfigError(
                "kd3a.weighting is h-divergence, which is measured in BatchNorm layers, and this "
                "model has none; choose another weighting or another model.name."
            )
        sums = [(torch.zeros(()), torch.zeros(()))] * len(layers)
        with evaluating(teacher), inputs_of(layers) as seen:
            for part in images.split(256):
                teacher(self.inputs(part))
                moments = [_moments(seen[layer]) for layer in layers]
                share = len(part) / len(images)
                sums = [
                    (m + share * a.cpu(), s + share * b.cpu())
                    for (m, s), (a, b) in zip(sums, moments, strict=True)
                ]
        mean = [m.running_mean.cpu() for m in layers]  # type: ignore[union-attr]
        var = [m.running_var.cpu() for m in layers]  # type: ignore[union-attr]
        target_var = [second - mu**2 for mu, second in sums]
        total = batchnorm_distance(mean, var, [mu for mu, _ in sums], target_var)
        return float(total) / sum(len(m) for m in mean)


def _moving(model: Model, x: Tensor) -> Tensor:
    """Predict with the batch's own statistics, and update the running ones -> (N, C)."""
    with evaluating(model):
        for layer in batchnorms(model).values():
            layer.train()
        return model(x).softmax(dim=1).cpu()


def _statistics(model: Model) -> Moments:
    """Copies of the running mean and variance of every BatchNorm layer."""
    layers = batchnorms(model).values()
    return [(m.running_mean.clone(), m.running_var.clone()) for m in layers]  # type: ignore[union-attr]


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and second moment per channel of (N, d) or (N, d, H, W) -> (d,), (d,)."""
    x, axes = x.float(), [a for a in range(x.dim()) if a != 1]
    return x.mean(dim=axes), (x**2).mean(dim=axes)
