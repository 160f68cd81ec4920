// A button on every block of code that copies it. Of an interactive session it copies what was typed.
const typed = (text) => {
  const lines = text.replace(/\n$/, "").split("\n");
  const input = lines.filter((line) => /^(>>>|\.\.\.)( |$)/.test(line));
  return (input.length ? input.map((line) => line.slice(4)) : lines).join("\n") + "\n";
};

const copied = async (text) => {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea"); // pages that are opened as files have no clipboard
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("not copied");
};

document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div.highlight")) {
    const button = document.createElement("button");
    button.className = "copy";
    button.type = "button";
    button.textContent = "Copy";
    button.setAttribute("aria-label", "Copy this code");
    button.addEventListener("click", async () => {
      const said = await copied(typed(block.querySelector("pre").textContent)).then(
        () => "Copied",
        () => "Select and copy",
      );
      button.textContent = said;
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    block.append(button);
  }
});
