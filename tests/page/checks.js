// What the tests ask of every view. Evaluated in the page; the value is an object of lists, which are empty where all is well.
(() => {
  const LEAST = 4.5, LEAST_LARGE = 3;
  const shown = (node) => node.checkVisibility({ checkVisibilityCSS: true, checkOpacity: true });
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  const seen = new Map();

  function rgba(colour) {
    if (!seen.has(colour)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      seen.set(colour, [r, g, b, a / 255]);
    }
    return seen.get(colour);
  }

  const over = (top, below) => top.slice(0, 3).map((part, at) => part * top[3] + below[at] * (1 - top[3]));

  function luminance(colour) {
    const [r, g, b] = colour.map((part) => (part / 255 <= 0.03928 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }

  function contrast(one, other) {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  }

  /** What is behind a point of an element, from the ground up. */
  function behind(element, x, y) {
    const stack = document.elementsFromPoint(x, y).filter((other) => other.localName !== "text" && !(other.localName === "path" && other.classList.contains("line")));
    const layers = [];
    for (const other of stack) {
      if (element.contains(other) && other !== element) continue;
      const style = getComputedStyle(other);
      const colour = other instanceof SVGElement && other.localName !== "svg" ? style.fill : style.backgroundColor;
      const layer = colour === "none" ? [0, 0, 0, 0] : [...rgba(colour)];
      if (other instanceof SVGElement) layer[3] *= Number(style.opacity);
      layers.push(layer);
      if (layer[3] === 1) break;
    }
    return layers.reverse().reduce((ground, layer) => over(layer, ground), [255, 255, 255]);
  }

  function faint() {
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const element = walker.currentNode.parentElement;
      if (!walker.currentNode.data.trim() || !shown(element) || element.closest(".unseen, .skip")) continue;
      const range = document.createRange();
      range.selectNodeContents(walker.currentNode);
      const box = range.getClientRects()[0];
      if (!box || box.width < 1) continue;
      const [x, y] = [box.left + box.width / 2, box.top + box.height / 2];
      if (x < 0 || y < 0 || x >= innerWidth || y >= innerHeight) continue; // what is there cannot be asked for
      const style = getComputedStyle(element);
      const ground = behind(element, x, y);
      const ink = over(rgba(element instanceof SVGElement ? style.fill : style.color), ground);
      const size = parseFloat(style.fontSize);
      const least = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? LEAST_LARGE : LEAST;
      const ratio = contrast(ink, ground);
      if (ratio < least) found.push(`${walker.currentNode.data.trim().slice(0, 40)}: ${ratio.toFixed(2)} (${element.getAttribute("class") ?? element.localName})`);
    }
    return found;
  }

  const nameOf = (node) => node.getAttribute("aria-label") || (node.getAttribute("aria-labelledby") ?? "").split(" ").map((id) => document.getElementById(id)?.textContent ?? "").join("")
    || [...(node.labels ?? [])].map((label) => label.textContent).join("") || node.textContent.trim() || node.getAttribute("alt");

  function nameless() {
    return [...document.querySelectorAll("a, button, input, summary, [tabindex], [role], section, nav, progress, img")]
      .filter((node) => shown(node) && !nameOf(node) && node.id !== "main" && node.id !== "said").map((node) => node.outerHTML.slice(0, 120));
  }

  function structure() {
    const found = [];
    const count = (what) => document.querySelectorAll(what).length;
    if (count("h1") !== 1) found.push(`${count("h1")} h1`);
    for (const mark of ["header", "main", "footer"]) if (count(mark) !== 1) found.push(`${count(mark)} ${mark}`);
    let level = 1;
    for (const heading of document.querySelectorAll("h1, h2, h3, h4")) {
      if (Number(heading.localName[1]) > level + 1) found.push(`${heading.localName} after h${level}: ${heading.textContent}`);
      level = Number(heading.localName[1]);
    }
    const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
    found.push(...ids.filter((id, at) => ids.indexOf(id) !== at).map((id) => `twice: ${id}`));
    for (const attribute of ["aria-labelledby", "aria-describedby", "aria-controls"]) {
      for (const node of document.querySelectorAll(`[${attribute}]`)) if (!document.getElementById(node.getAttribute(attribute))) found.push(`${attribute} of ${node.id} leads nowhere`);
    }
    return found;
  }

  function wide() {
    const root = document.documentElement;
    if (root.scrollWidth <= root.clientWidth) return [];
    return [...document.body.querySelectorAll("*")].filter((node) => node.getBoundingClientRect().right > root.clientWidth + 1 && !node.closest(".scroll, pre, .tabs, .unseen"))
      .slice(0, 5).map((node) => `${node.localName}.${node.getAttribute("class")} ${Math.round(node.getBoundingClientRect().right)}`).concat(`page ${root.scrollWidth} of ${root.clientWidth}`);
  }

  return { faint: faint(), nameless: nameless(), structure: structure(), wide: wide() };
})();
