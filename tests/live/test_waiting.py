"""A real machine says on its panel what it waits for: a stage without a machine."""

from pathlib import Path

from tests.live.test_meeting_point import run_of


async def test_status_and_join_say_what_a_lone_machine_waits_for(tmp_path: Path) -> None:
    async with run_of(tmp_path, "bootstrap") as run:
        await run.meet()
        (tmp_path / "invite.txt").write_text(run.once("invite", "run", "--home", "meet"))
        await run.join("n")
        await run.until(lambda: bool(run.events("n", "node.ready")), "it answers")

        def panel() -> str:
            return " ".join(run.once("status", "--home", "n").split())

        alone = "nothing can be trained until a machine serves stage"
        await run.until(lambda: alone in panel(), "the panel tells")
        await run.until(lambda: alone in run.text("n.err") and "What helps: invite" in run.text("n.err"), "join tells")
        assert "trains stage" not in run.text("n.err"), "nothing has passed through it"
