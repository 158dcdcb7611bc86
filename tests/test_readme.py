"""What the README shows works as it is shown."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_your_own_environment_agent_reward_and_node_train_as_the_readme_shows(
    tmp_path: Path,
) -> None:
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", README.read_text(), re.DOTALL)
    assert [name for name, _ in blocks] == ["my_task.py", "train_mine.py"]
    for name, text in blocks:
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "train_mine.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    assert "everything in runs/mine-" in done.stdout
    metrics = next((tmp_path / "runs").glob("mine-*/metrics.jsonl")).read_text()
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
