// Elements made from data, and a page that is made to look like them. Data is only ever set as text or as an attribute: no markup
// is read from it.

const SVG = "http://www.w3.org/2000/svg";
const DRAWN = new Set(["svg", "g", "path", "rect", "line", "text", "circle"]);

/** An element; attributes that are null or false are left out, children that are strings become text. */
export function h(name, attributes, ...children) {
  const node = DRAWN.has(name) ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

/** Make `place` hold what `children` are, with as few changes as possible: focus, scrolling and what was typed stay. */
export function fill(place, ...children) {
  const focused = document.activeElement?.id;
  alike(place, h("div", null, ...children));
  if (focused && document.activeElement === document.body) document.getElementById(focused)?.focus({ preventScroll: true });
}

function alike(old, fresh) {
  const theirs = [...fresh.childNodes];
  theirs.forEach((child, at) => {
    const mine = old.childNodes[at];
    if (!mine) old.append(child);
    else if (!sameKind(mine, child)) mine.replaceWith(child);
    else update(mine, child);
  });
  while (old.childNodes.length > theirs.length) old.lastChild.remove();
}

function sameKind(one, other) {
  return one.nodeType === other.nodeType && one.nodeName === other.nodeName && one.id === other.id;
}

function update(mine, fresh) {
  if (mine.nodeType !== Node.ELEMENT_NODE) {
    if (mine.data !== fresh.data) mine.data = fresh.data;
    return;
  }
  for (const { name } of [...mine.attributes]) {
    if (!fresh.hasAttribute(name) && name !== "open") mine.removeAttribute(name); // a reader opens and closes details
  }
  for (const { name, value } of fresh.attributes) {
    if (mine.getAttribute(name) !== value) mine.setAttribute(name, value);
  }
  alike(mine, fresh);
}
