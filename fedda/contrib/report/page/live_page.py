"""The live page: who is there, who trains, how far the run is, and the report of what there is."""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from fedda.errors import RunError, typed
from fedda.results.progress import clock, waits
from fedda.results.read import ABOUT, RESULTS, counted, duration, human, load, noted
from fedda.results.snapshot import RunNow, SiteNow, Snapshot
from fedda.results.sofar import results
from fedda.results.story import DONE, FAILED, WAITS, JournalReader, Story, settings_of

from .document import SCRIPT as TOOLS
from .document import allowed, document
from .headline import numbers
from .html import NOTHING, Html, card, e, note, section, table
from .noted import Noted
from .page import parts
from .series import RunSeries as Shown

MOST_SITES, MOST_RUNS, MOST_TROUBLES = 200, 12, 5


def now(
    snapshot: Snapshot, run: RunNow | None, story: Story, names: Mapping[int, str], which: str
) -> list[Html | None]:
    """Make the first screen: the state in words, cards, sites, the last troubles, other runs."""
    return [
        e("h1", _title(run, story, which)),
        e("p", sentence(run, story), class_="sub"),
        e("div", *_cards(snapshot, run, story), class_="cards") if run else None,
        progress(story) if run else None,
        section("now", "Sites now", *_sites(snapshot, run, story, names)),
        _troubles(story),
        _runs(snapshot, run),
    ]


def _title(run: RunNow | None, story: Story, which: str) -> str:
    if run is None:
        return f"The server knows no run {which}" if which else "No run has begun"
    on = f" on {', '.join(story.targets)}" if story.targets else ""
    trains = story.current[0] if story.current else run.method
    return f"{run.name}: {run.method}{on}" + f", now its baseline {trains}" * (trains != run.method)


def sentence(run: RunNow | None, story: Story) -> str:
    """Say in words where the run is."""
    if run is None:
        return "The sites below are registered. A run begins with: fedda run METHOD --server DIR"
    if state := ended(run, story):
        return f"The run has {state}." + (f" {story.why}" if story.why else "")
    if story.awaited:
        text = waits(story, story.last)
        return f"{text[0].upper()}{text[1:]}."
    if story.current is None:
        return f"The run is {story.state}{' for sites' * (story.state == WAITS)}."
    method, seed, target = story.current
    which, of = story.place
    where = f" on {target}" if target else ""
    training = f", training {which} of {of}" if of > 1 else ""
    return (
        f"Training {method}{where}, seed {seed}{training}: round {story.round} of {story.rounds}."
    )


def ended(run: RunNow, story: Story) -> str:
    """How a run ended: finished, failed or been stopped; empty while it goes on."""
    if story.state == DONE:
        return "finished"
    if run.ending == "stopped" or story.stopped:
        return "been stopped"
    return "failed" if story.state == FAILED or run.ended else ""


def _cards(snapshot: Snapshot, run: RunNow, story: Story) -> list[Html]:
    online = sum(site.online for site in snapshot.sites)
    newest, total = story.newest, sum(story.bytes().values())
    seconds = story.per_round

    cards = [
        card(
            "Round",
            e("span", f"{story.round:,}", e("small", f" of {story.rounds:,}")),
            NOTHING if seconds is None else f"{seconds:.1f} s per round",
            "card main",
        )
    ]
    if state := ended(run, story):
        cards.append(card("Run", state, f"after {duration(story.last - story.began)}"))
    else:
        left = NOTHING if story.left is None else clock(story.left)
        cards.append(card("Left, estimated", left, "for all trainings of the run"))
    if "accuracy" in newest:
        cards.append(card("Accuracy", f"{100 * newest['accuracy']:.1f} %", "of the newest round"))
    elif "loss" in newest:
        cards.append(card("Training loss", f"{newest['loss']:.3f}", "of the newest round"))
    cards.append(card("Bytes so far", human(total), "arrays of all kinds, and scalars"))
    cards.append(card("Sites reachable", f"{online:,}", f"of {len(snapshot.sites):,} registered"))
    bad = e("span", f"{len(story.troubles):,}", class_="bad")
    cards.append(card("Troubles", bad if story.troubles else "none", "of the run so far"))
    return cards


def progress(story: Story) -> Html | None:
    """Make a bar over all trainings of the run; over this one if nobody knows the others."""
    if story.current is None or not story.rounds:
        return None
    _, of = story.place
    done, whole = sum(story.seen.values()) if of else story.round, story.rounds * (of or 1)
    words = f"{done} of {whole} rounds"
    return e("progress", words, max=whole, value=min(done, whole), aria_label="Rounds done")


def _sites(
    snapshot: Snapshot, run: RunNow | None, story: Story, names: Mapping[int, str]
) -> list[Html]:
    troubles = Counter(str(event.get("site", "")) for event in story.troubles)
    shown = snapshot.sites[:MOST_SITES]
    rows = []
    for site in sorted(shown, key=lambda s: (not s.online, called(s, names))):
        name = called(site, names)
        rows.append(
            [
                name,
                story.joined.get(name) or site.role or NOTHING,
                e("span", "yes", class_="good") if site.online else e("span", "no", class_="bad"),
                "yes" if name in story.joined else NOTHING,
                site.working(run) or NOTHING,
                f"{troubles[name]:,}",
            ]
        )
    if not rows:
        return [note("No site is registered. Admit one by: fedda keys sign NAME.pub --dir DIR")]
    head = ["site", "role", "reachable", "in this run", "now", "troubles"]
    made = table(head, rows, left=2, wrap=[0], label="Sites now", open_=len(rows) <= 15)
    more = len(snapshot.sites) - len(shown)
    return [made, *([note(f"{counted(more, 'more site')} not shown.")] if more else [])]


def called(site: SiteNow, names: Mapping[int, str]) -> str:
    """A site's name: as the run knows it, or as the server does."""
    return names.get(site.node) or site.called


def _troubles(story: Story) -> Html | None:
    """The last troubles; all are further below."""
    if not story.troubles:
        return None
    rows = [
        [str(t.get("round", NOTHING)), str(t.get("site") or NOTHING), str(t.get("text", ""))]
        for t in story.troubles[-MOST_TROUBLES:][::-1]
    ]
    made = table(["round", "site", "in words"], rows, left=3, wrap=[1, 2], label="Last troubles")
    return section("last", "Last troubles", made)


def _runs(snapshot: Snapshot, run: RunNow | None) -> Html | None:
    others = [other for other in snapshot.runs if other is not run][:MOST_RUNS]
    if not others:
        return None
    links = [
        e("li", e("a", r.name, href=f"/live?run={r.number}"), f" ({r.ending or r.status})")
        for r in others
    ]
    return section("runs", "Other runs", e("ul", *links))


# Fetches this page again at each event, and puts its part `live` in the place of the old one.
FOLLOWS = """
const live=()=>document.getElementById("live"),lost=document.getElementById("lost");
const ask=new URLSearchParams(location.search);
ask.set("seen",live().dataset.version);
const name=s=>(s.closest("figure,section")?.querySelector("h3,h2")?.textContent??"")+s.textContent;
let busy=false,again=false;
async function refresh(){
  if(busy){again=true;return}
  busy=true;
  try{
    do{
      again=false;
      const answer=await fetch(location.pathname+location.search,{cache:"no-store"});
      if(!answer.ok)throw answer.status;
      const next=new DOMParser().parseFromString(await answer.text(),"text/html")
        .getElementById("live");
      const open=new Set([...live().querySelectorAll("details[open]>summary")].map(name));
      for(const s of next.querySelectorAll("details>summary"))s.parentNode.open=open.has(name(s));
      const big=new Set([...live().querySelectorAll("figure.big h3")].map(h=>h.textContent));
      live().replaceWith(next);
      dress();
      for(const h of next.querySelectorAll("figure h3"))
        if(big.has(h.textContent))h.closest("figure").querySelector(".tools button").click();
      tip.hidden=true;
    }while(again);
    lost.hidden=true;
  }catch{lost.hidden=false}
  busy=false;
}
const events=new EventSource("/live/events?"+ask);
events.onmessage=refresh;
events.onopen=()=>{lost.hidden=true};
events.onerror=()=>{lost.hidden=false};
"""
SCRIPT = TOOLS + FOLLOWS
POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed(SCRIPT)}; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'"
)


def page(snapshot: Snapshot, which: str, version: str) -> str:
    """Return the whole page.

    Args:
        snapshot: the sites and runs.
        which: the run to show, by name or number; empty for the newest.
        version: of what is shown; the page asks for events after it.
    """
    run = snapshot.run(which)
    story, content = Story(), list[Html | None]()
    names: dict[int, str] = {}
    if run is not None:
        story, roster = JournalReader(run.path).look(), noted(run.path / "roster.json")
        names = {node["id"]: node["name"] for node in roster.get("nodes", ())}
        content = report(story, run, roster)
    title = f"{run.name if run else 'waiting for a run'}: live"
    first = now(snapshot, run, story, names, which)
    shown = e("div", *first, *content, id="live", data_version=version)
    words = "The server gives no new page; this one is as it was. "
    lost = e("p", words, id="lost", class_="bad", hidden=True)
    again = e("a", "Reload", href=f"?run={quote(which, safe='')}" if which else "?")
    without = e("noscript", e("p", again, " to see what has changed.", class_="sub"))
    return document(title, lost, shown, without, policy=POLICY, script=SCRIPT)


def report(story: Story, run: RunNow, roster: Mapping[str, Any]) -> list[Html | None]:
    """Make the report of a run as far as it has come; nothing before its first round."""
    about = noted(run.path / ABOUT)
    if not about.get("defaults"):  # the sections would load torch, for this version's defaults
        its = typed("fedda", "report", run.folder)
        words = f"The run is of an older version; when it has ended: {its}"
        return [section("so-far", "Results so far", note(words))] if story.trainings else []
    found = results(story, run.name, settings_of(run.path), roster, about)
    if (run.path / RESULTS).is_file() and ended(run, story):
        with suppress(RunError):
            found = load(run.path) | {"defaults": about["defaults"]}
    if not found["trainings"]:
        return []
    shown = Shown(found)
    return [section("so-far", "Results so far", numbers(shown)), *parts(shown, Noted())]
