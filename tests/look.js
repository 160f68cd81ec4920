// What a person would stumble over on a page, as sentences; none if it is well. Run inside of the page. Where
// its text is does not matter if `colours` alone are looked at, which takes a third of the time.
(colours) => {
  const found = [], add = (text) => { if (found.length < 20) found.push(text); };
  const name = (e) => `${e.tagName.toLowerCase()}.${e.getAttribute("class") || ""} "${e.textContent.trim().slice(0, 40)}"`;
  // A phone shows a page that is too wide smaller, and calls that its window.
  const wide = document.documentElement.scrollWidth, room = Math.min(innerWidth, screen.width);
  if (wide > room) add(`the page is ${wide} wide in a window of ${room}`);

  // Colours: of the text, and of whatever is behind it.
  const kept = (f, known = new Map()) => (x) => { if (!known.has(x)) known.set(x, f(x)); return known.get(x); };
  const rgb = kept((text) => (text.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number));
  const light = (c) => {
    const [r, g, b] = c.slice(0, 3).map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = kept((e) => {
    const c = rgb(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c;
    return e.parentElement ? paper(e.parentElement) : [255, 255, 255];
  });
  const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };

  // Lines of text, and where they are.
  const lines = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const e = node.parentElement;
    if (!node.data.trim() || !e.checkVisibility() || e.closest("script, style, title")) continue;
    const style = getComputedStyle(e), ink = rgb(e.closest("svg") ? style.fill : style.color);
    const ratio = contrast(ink, paper(e));
    if (ratio < 4.5) add(`contrast ${ratio.toFixed(1)} of ${name(e)}`);
    if (colours) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const r of range.getClientRects()) {
      if (r.width < 1) continue;
      lines.push({ e, r });
      if (r.right > room + 1) add(`beyond the edge: ${name(e)}`);
    }
  }
  if (colours) return found;
  lines.sort((a, b) => a.r.top - b.r.top);
  for (let i = 0; i < lines.length; i++) {
    for (let j = i + 1; j < lines.length && lines[j].r.top < lines[i].r.bottom; j++) {
      const [a, b] = [lines[i].r, lines[j].r];
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      // Boxes of lines are a little taller than their letters.
      if (across > 1.5 && down > 0.4 * Math.min(a.height, b.height)) add(`${name(lines[i].e)} lies over ${name(lines[j].e)}`);
    }
  }
  // A drawing may have points where it has no text.
  for (const e of document.querySelectorAll("svg, svg circle")) {
    const r = e.getBoundingClientRect();
    if (r.width && r.right > room + 1) add(`beyond the edge: ${e.tagName} at ${Math.round(r.right)}`);
  }
  if (lines.length < 20) add(`there are ${lines.length} lines of text alone`);
  return found;
}
