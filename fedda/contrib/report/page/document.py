"""What surrounds a page's content: its looks, its script, and what the browser may do.

The looks are for light and dark, narrow and wide, and paper. The script is the page's only one:
values under the pointer, larger figures, figures as CSV and SVG. Without it the page shows the same
figures and tables: the browser shows the values of a round after a while, as a title. It reads the
page alone, sends nothing, and its policy allows no other script.
"""

import base64
import hashlib
from typing import Any

from .html import Html, e

# Okabe and Ito's colours, which colour-blind readers can tell apart. They are lighter on a dark
# page; yellow is left out, because it cannot be seen on a light page. k0, the text colour, is the
# target's.
CSS = """
:root{color-scheme:light dark;--bg:#f6f7f8;--card:#fff;--ink:#16191d;--soft:#59616b;--line:#dde1e6;
--shade:#0003;--good:#00664b;--bad:#a63d00;--heat:0 114 178;--on:#fff;--k0:#16191d;--k1:#0072b2;
--k2:#d55e00;--k3:#009e73;--k4:#b5548f;--k5:#c98a00;--k6:#3f9fdc;--k7:#7d7d7d}
@media(prefers-color-scheme:dark){:root{--bg:#101214;--card:#191c20;--ink:#eceff2;--soft:#9ea7b1;
--shade:#fff4;--line:#32373d;--good:#3ecfa4;--bad:#ff9a5c;--heat:86 180 233;--on:#0b0d0f;
--k0:#eceff2;--k1:#56b4e9;--k2:#ff8a3d;--k3:#2cc295;--k4:#e493c4;
--k5:#f0b73c;--k6:#9fd4f5;--k7:#9a9a9a}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,
"Segoe UI",Roboto,"Noto Sans","Liberation Sans",sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1500px;margin:0 auto;padding:20px clamp(12px,3vw,40px) 60px}
h1{font-size:clamp(22px,3.2vw,30px);line-height:1.2;margin:0;overflow-wrap:anywhere}
h2{font-size:20px;margin:44px 0 12px}
h3{font-size:15px;margin:0}
p{margin:6px 0;max-width:80ch}
a{color:var(--k1)}
.soft,.sub{color:var(--soft)}
.sub{margin:4px 0 0;overflow-wrap:anywhere}
nav{display:flex;flex-wrap:wrap;gap:2px 16px;margin-top:12px;font-size:14px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(225px,1fr));gap:12px;margin:20px 0}
.card,figure{background:var(--card);border:1px solid var(--line);border-radius:10px;min-width:0}
.card{padding:12px 16px}
.card b{display:block;font-size:27px;line-height:1.25;letter-spacing:-.01em}
.card b small{display:inline-block;margin-left:.35em;font-size:16px;font-weight:500;
white-space:nowrap}
.card.main{border-color:var(--k1);box-shadow:inset 0 3px 0 var(--k1)}
.card>span{display:block;font-size:13px;color:var(--soft)}
.card>.what{color:var(--ink);font-size:14px}
.good{color:var(--good)}.bad{color:var(--bad)}
.lead{display:flex;flex-wrap:wrap;gap:0 28px;align-items:flex-start}
.lead>div:last-child{flex:1 1 320px}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,max(345px,30%)),1fr));gap:14px;
align-items:start}
.two{grid-template-columns:repeat(auto-fit,minmax(min(100%,max(345px,40%)),1fr))}
.scroll+.grid,.note+.grid,.grid+.grid{margin-top:14px}
figure{margin:0;padding:14px 16px 12px}
figcaption{display:flex;flex-wrap:wrap;justify-content:space-between;gap:0 12px;margin-bottom:8px}
figcaption h3{overflow-wrap:anywhere}
figcaption span,.note{font-size:13px;color:var(--soft)}
.note{margin:6px 0 0}
.tree{margin:6px 0 0;padding-left:22px}
.plot{display:grid;grid-template-columns:auto 1fr;grid-template-rows:230px auto auto;
font-size:12px;color:var(--soft)}
.plot.tall{grid-template-rows:300px auto auto}
.ys{position:relative;min-width:2.6em;grid-row:1}
.ys i{visibility:hidden;display:block;height:0;padding-right:8px;font-style:normal;
white-space:nowrap}
.ys span{position:absolute;right:8px;transform:translateY(50%);white-space:nowrap;line-height:1}
.xs{position:relative;height:18px;grid-column:2}
.xs span{position:absolute;transform:translateX(-50%);top:4px;line-height:1}
.xl{grid-column:2;text-align:center}
.plot svg{width:100%;height:100%;overflow:visible;display:block}
svg path,svg line{fill:none;stroke-linejoin:round;vector-effect:non-scaling-stroke}
.gl{stroke:var(--line);stroke-width:1}
.m{stroke-width:2.2}.s{stroke-width:1;opacity:.45}
.dense .m{stroke-width:1.5}.dense .s{opacity:.25}
.trouble{stroke:var(--bad);stroke-width:8;stroke-linecap:round}
.dot{stroke-width:6;stroke-linecap:round}
.ring{stroke-width:12;stroke-linecap:round}.ring+.ring{stroke:var(--card)!important;stroke-width:7}
.ring~.in{stroke-width:3;stroke-linecap:round}
.d1{stroke-dasharray:7 4}.d2{stroke-dasharray:2 3.5}.d3{stroke-dasharray:9 3 2 3}
.hit{fill:transparent}.hit:hover{fill:var(--soft);fill-opacity:.13}
.k0{stroke:var(--k0)}.k1{stroke:var(--k1)}.k2{stroke:var(--k2)}.k3{stroke:var(--k3)}
.k4{stroke:var(--k4)}.k5{stroke:var(--k5)}.k6{stroke:var(--k6)}.k7{stroke:var(--k7)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 18px;margin:8px 0 0;padding:0;
font-size:13px}
.legend li{display:flex;align-items:center;gap:7px;min-width:0;overflow-wrap:anywhere}
.legend svg{flex:none;overflow:visible}
.legend b{font-weight:600;white-space:nowrap}
details{margin-top:8px}
summary{cursor:pointer;color:var(--soft);font-size:13px}
summary:hover{color:var(--ink)}
.scroll{overflow:auto;width:fit-content;max-width:100%;max-height:460px;margin-top:8px;
border:1px solid var(--line);border-radius:8px;background:
linear-gradient(90deg,transparent,var(--card) 70%) 100% 0/48px 100% no-repeat local,
linear-gradient(90deg,transparent,var(--shade)) 100% 0/16px 100% no-repeat,var(--card)}
.scroll.open{max-height:none}
table{border-collapse:collapse;font-size:13.5px}
th,td{padding:5px 14px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
tbody tr:last-child>*{border-bottom:0}
thead th{position:sticky;top:0;background:var(--card);color:var(--soft);font-weight:500;
box-shadow:0 1px 0 var(--line)}
th{font-weight:500}
tbody th{position:sticky;left:0;background:var(--card)}
.pair+.pair{display:inline-block;min-width:6em;color:var(--soft)}
.l{text-align:left}
.wrap{white-space:normal;overflow-wrap:anywhere;min-width:9em}
.strong>*{font-weight:650}.faint>*{color:var(--soft)}
.tag{display:inline-block;border:1px solid currentColor;border-radius:99px;padding:0 8px;
font-size:12px}
progress{width:100%;height:8px;accent-color:var(--k1)}
.square{aspect-ratio:1;max-width:min(100%,560px);margin:0 auto}
.square svg{width:100%;height:100%;display:block}
.square path{stroke-width:5;stroke-linecap:round;stroke-opacity:.75}
.square .faded{stroke-opacity:.28;stroke-width:4}
.square .q{stroke-linecap:square}.square .thin,.legend .thin{stroke-width:1.6}
.wide{overflow:auto}
.heat{margin:0 auto;font-size:12px}
.heat td,.heat th{border:0;padding:0;text-align:center;height:30px;min-width:30px;max-width:7em;
overflow:hidden;text-overflow:ellipsis}
.heat thead th{position:static;box-shadow:none;padding:0 3px}
.heat tbody th{text-align:right;padding-right:8px}
.heat td{background:rgb(var(--heat)/var(--v));border:1px solid var(--card)}
.heat .hi{color:var(--on)}.heat .diag{outline:1.5px solid var(--soft);outline-offset:-2px}
.heat .none{color:transparent}
.heat .soft{max-width:none;padding-right:8px}
.tools{display:flex;gap:14px;margin-top:8px}
.tools button{all:unset;cursor:pointer;font-size:13px;color:var(--k1)}
.tools button:hover,.tools button:focus-visible{text-decoration:underline}
.tip{position:fixed;z-index:9;pointer-events:none;white-space:pre;font-size:12.5px;padding:6px 10px;
background:var(--ink);color:var(--bg);border-radius:6px;max-width:calc(100vw - 8px);overflow:hidden}
.big{grid-column:1/-1}.big .plot{grid-template-rows:min(65vh,800px) auto auto}
.big .square{max-width:min(100%,85vh)}
code{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace}
@media(max-width:520px){.plot{grid-template-rows:200px auto auto}
.plot.tall{grid-template-rows:230px auto auto}
figure{padding:12px 10px 10px}.card b{font-size:24px}th,td{padding:5px 8px}
.pair,.pair+.pair{display:block;min-width:0}
thead th,tbody th{white-space:normal}thead th{vertical-align:bottom;line-height:1.25}}
@media(max-width:1000px){.heat td,.heat th{min-width:25px;height:26px}.heat thead th{padding:0 2px}}
@media print{body{background:#fff}figure,.card{break-inside:avoid}nav,.tools,.tip{display:none}
.scroll{max-height:none}}
"""


# Letters of a figure are HTML beside the drawing, so that SVG gets them at their places on screen.
# A cell that begins like a formula gets an apostrophe, as a site's name may reach a spreadsheet.
SCRIPT = """
const made=(name,text,acts)=>{
  const b=document.createElement(name);
  b.textContent=text;
  if(acts){b.type="button";b.addEventListener("click",acts)}
  return b;
};
const save=(figure,ending,type,text)=>{
  const link=made("a","");
  link.href=URL.createObjectURL(new Blob([text],{type}));
  const title=figure.querySelector("h3").textContent;
  link.download=title.replace(/[^\\p{L}\\p{N}]+/gu,"-").replace(/^-|-$/g,"")+ending;
  link.click();
  setTimeout(()=>URL.revokeObjectURL(link.href),1000);
};
const cell=c=>{
  let text=c.querySelector("data")?.value??c.textContent;
  if(/^[=+@\\t\\r-]/.test(text)&&isNaN(text))text="'"+text;
  return /[",\\n]/.test(text)?'"'+text.replaceAll('"','""')+'"':text;
};
const csv=figure=>[...figure.querySelector("details table").rows]
  .map(row=>[...row.cells].map(cell).join(",")+"\\n").join("");
const LOOK=["fill","fill-opacity","stroke","stroke-width","stroke-dasharray","stroke-linecap",
  "stroke-linejoin","stroke-opacity","opacity","vector-effect","paint-order","text-anchor",
  "dominant-baseline","font-family","font-size","font-weight"];
const svg=figure=>{
  const own=n=>document.createElementNS("http://www.w3.org/2000/svg",n);
  const set=(n,values)=>{for(const k in values)n.setAttribute(k,values[k]);return n};
  const look=(from,to)=>{const s=getComputedStyle(from);for(const k of LOOK)to.style[k]=s[k]};
  const all=figure.getBoundingClientRect();
  const width=all.width,height=figure.querySelector(".legend").getBoundingClientRect().bottom
    -all.top+12;
  const out=set(own("svg"),{viewBox:`0 0 ${width} ${height}`,width,height});
  out.append(set(own("rect"),{width,height,fill:getComputedStyle(figure).backgroundColor}));
  for(const art of figure.querySelectorAll("svg")){
    const r=art.getBoundingClientRect(),copy=art.cloneNode(true);
    const to=[...copy.querySelectorAll("*")];
    [...art.querySelectorAll("*")].forEach((part,i)=>look(part,to[i]));
    copy.querySelectorAll(".hit,title").forEach(part=>part.remove());
    out.append(set(copy,{x:r.left-all.left,y:r.top-all.top,width:r.width,height:r.height,
      overflow:"visible"}));
  }
  const letters="h3,figcaption>span,.plot span,.xl,.legend span,.legend b";
  for(const words of figure.querySelectorAll(letters)){
    const r=words.getBoundingClientRect(),s=getComputedStyle(words);
    const text=set(own("text"),{x:r.left-all.left,y:r.top-all.top+r.height/2,fill:s.color,
      "dominant-baseline":"central"});
    for(const k of ["fontFamily","fontSize","fontWeight"])text.style[k]=s[k];
    if(words.className==="xl")set(text,{x:r.left-all.left+r.width/2,"text-anchor":"middle"});
    text.textContent=words.textContent;
    out.append(text);
  }
  return new XMLSerializer().serializeToString(out);
};
const dress=()=>{
  for(const figure of document.querySelectorAll("figure:not(.dressed)")){
    figure.classList.add("dressed");
    const tools=made("div","");
    tools.className="tools";
    if(figure.querySelector(".plot,.square"))
      tools.append(made("button","enlarge",e=>{
        e.target.textContent=figure.classList.toggle("big")?"reduce":"enlarge";
      }));
    if(figure.querySelector("details table"))
      tools.append(made("button","CSV",()=>save(figure,".csv","text/csv",csv(figure))));
    if(figure.querySelector("svg")&&figure.querySelector(".legend"))
      tools.append(made("button","SVG",()=>save(figure,".svg","image/svg+xml",svg(figure))));
    if(tools.children.length)figure.append(tools);
  }
};
dress();
const tip=made("div","");
tip.className="tip";
tip.hidden=true;
document.body.append(tip);
const point=e=>{
  const hit=e.target.closest?.(".hit"),title=hit?.querySelector("title");
  if(title){hit.dataset.says=title.textContent;title.remove()}  // the browser would show it, too
  tip.hidden=!hit;
  if(!hit)return;
  tip.textContent=hit.dataset.says;
  const r=tip.getBoundingClientRect();
  const left=e.clientX+14+r.width<innerWidth?e.clientX+14:e.clientX-14-r.width;
  tip.style.left=Math.max(4,left)+"px";
  tip.style.top=Math.max(4,Math.min(e.clientY+14,innerHeight-r.height-4))+"px";
};
for(const what of ["pointermove","pointerdown"])document.addEventListener(what,point);
"""


def allowed(script: str) -> str:
    """The source in a content security policy that allows this script and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


# Nothing may be loaded, and only the page's own script may run, even if something slipped through
# the escaping.
POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed(SCRIPT)}; "
    "base-uri 'none'; form-action 'none'"
)


def document(title: str, *content: Any, policy: str = POLICY, script: str = SCRIPT) -> str:
    """Return a document.

    Args:
        title: for the browser's tab.
        content: of the page.
        policy: what the browser may load and run.
        script: the text of the page's only script; the policy has to allow it.
    """
    head = e(
        "head",
        e("meta", charset="utf-8"),
        e("meta", name="viewport", content="width=device-width,initial-scale=1"),
        e("meta", http_equiv="Content-Security-Policy", content=policy),
        e("meta", name="color-scheme", content="light dark"),
        e("title", title),
        e("style", Html(CSS)),
    )
    body = e("body", e("main", *content), e("script", Html(script)))
    return f"<!doctype html>\n{e('html', head, body, lang='en')}\n"
