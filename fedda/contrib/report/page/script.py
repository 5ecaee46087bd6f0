"""The page's only script: values under the pointer, larger figures, figures as CSV and SVG.

Without it the page shows the same figures and tables: the browser shows the values of a round after
a while, as a title. It reads the page alone, sends nothing, and its policy allows no other script.
"""

import base64
import hashlib

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
