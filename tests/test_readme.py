"""What the README shows works as it is shown."""

import re
import runpy
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_your_own_environment_agent_reward_and_node_train_as_the_readme_shows(
    import_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", README.read_text(), re.DOTALL)
    assert [name for name, _ in blocks] == ["my_task.py", "train_mine.py"]
    for name, text in blocks:
        (import_folder / name).write_text(text)
    monkeypatch.chdir(import_folder)
    runpy.run_path("train_mine.py", run_name="__main__")
    assert "everything in runs/mine-" in capsys.readouterr().out
    metrics = next((import_folder / "runs").glob("mine-*/metrics.jsonl")).read_text()
    assert metrics.count("mine/best_reward") == 2


def test_every_page_the_readme_names_is_there() -> None:
    for page in re.findall(r"\]\(([\w/.]+)\)", README.read_text()):
        assert (README.parent / page).is_file(), page


def anchors_of(page: Path) -> set[str]:
    """The anchors that a page's headings get: lower case, dashes for spaces, no punctuation."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings
    }


def test_every_link_between_pages_leads_to_a_heading_that_is_there() -> None:
    root = README.parent
    for page in [*root.glob("*.md"), *(root / "docs").rglob("*.md")]:
        for target, anchor in re.findall(r"\]\(([\w/.-]*)#([\w-]+)\)", page.read_text()):
            linked = page.parent / target if target else page
            assert anchor in anchors_of(linked), f"{page.name} links to {target}#{anchor}"


def test_the_commands_the_readme_names_exist() -> None:
    makefile = (README.parent / "Makefile").read_text()
    for target in set(re.findall(r"make (\w+)", README.read_text())):
        assert f"\n{target}:" in makefile, target
    recipes = README.parent / "vla_rl" / "recipes"
    for module in set(re.findall(r"-m vla_rl\.recipes\.(\w+)", README.read_text())):
        assert (recipes / f"{module}.py").is_file() or (
            recipes / module / "__main__.py"
        ).is_file(), module
