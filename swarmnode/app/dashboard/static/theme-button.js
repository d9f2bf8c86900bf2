// The button that switches between light and dark. `then` is called after each switch.
export function themeButton(button, then = () => {}) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  button.addEventListener("click", () => {
    const now = document.documentElement.dataset.theme || (dark.matches ? "dark" : "light");
    const next = now === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try { localStorage.setItem("theme", next); } catch { /* not kept */ }
    then();
  });
  dark.addEventListener("change", then);
}
