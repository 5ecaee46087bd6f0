"""The live page: who is there, who trains, how far the run is, and the report of what there is."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from fedda.errors import RunError, typed
from fedda.results.read import ABOUT, RESULTS, load, noted
from fedda.results.snapshot import RunNow, Snapshot
from fedda.results.sofar import results
from fedda.results.story import JournalReader, Story, settings_of

from .headline import numbers
from .html import Html, e
from .noted import Noted
from .now import ended, now
from .page import document, parts
from .parts import note, section
from .script import SCRIPT as TOOLS
from .script import allowed
from .series import RunSeries as Shown

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
