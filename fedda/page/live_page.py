"""The live page: who is there, who trains, how far the run is, and the report of what there is."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from fedda.errors import RunError
from fedda.results.read import RESULTS, load
from fedda.results.snapshot import Run, Snapshot
from fedda.results.sofar import about_of, results, roster_of
from fedda.results.story import Journal, Story, settings_of

from .headline import numbers
from .html import Html, e
from .noted import Noted
from .now import ended, now
from .page import document, parts
from .parts import section
from .script import SCRIPT as TOOLS
from .script import allowed
from .series import Run as Shown

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


def page(snapshot: Snapshot, which: str, version: str, journals: dict[str, Journal]) -> str:
    """Return the whole page.

    Args:
        snapshot: the sites and runs.
        which: the run to show, by name or number; empty for the newest.
        version: of what is shown; the page asks for events after it.
        journals: those read before, by folder; kept so that each is read only once.
    """
    run = snapshot.run(which)
    story, content = Story(), list[Html | None]()
    names: dict[int, str] = {}
    if run is not None:
        if run.folder not in journals:
            journals.clear()
            journals[run.folder] = Journal(run.path)
        story = journals[run.folder].look()
        roster = roster_of(run.path)
        names = {node["id"]: node["name"] for node in roster.get("nodes", ())}
        content = report(story, run, roster)
    title = f"{run.name if run else 'waiting for a run'}: live"
    shown = e(
        "div",
        *now(snapshot, run, story, names, which),
        *content,
        id="live",
        data_version=version,
    )
    again = "?" + f"run={quote(which, safe='')}" if which else "?"
    lost = e(
        "p",
        "The server gives no new page; this one is as it was. ",
        id="lost",
        class_="bad",
        hidden=True,
    )
    return document(
        title, lost, shown, e("noscript", reload_link(again)), policy=POLICY, script=SCRIPT
    )


def reload_link(address: str) -> Html:
    """Make what a browser without scripts needs instead of the events."""
    return e("p", e("a", "Reload", href=address), " to see what has changed.", class_="sub")


def report(story: Story, run: Run, roster: Mapping[str, Any]) -> list[Html | None]:
    """Make the report of a run as far as it has come; nothing before its first round."""
    about = about_of(run.path)
    found: Mapping[str, Any] | None = None
    if (run.path / RESULTS).is_file() and ended(run, story):
        try:
            found = load(run.path) | {"defaults": about.get("defaults")}
        except RunError:
            found = None
    found = found or results(story, run.name, settings_of(run.path), dict(roster), about)
    if not found["trainings"]:
        return []
    shown = Shown(dict(found))
    return [section("so-far", "Results so far", numbers(shown)), *parts(shown, Noted())]


_journals: dict[str, Journal] = {}  # of the process that makes the pages


def made(snapshot: Mapping[str, Any], which: str, version: str) -> str:
    """Make a page from what a process can send to another -> the page."""
    return page(Snapshot.of(snapshot), which, version, _journals)
