"""Which figures of a run the page of metrics does not explain."""

import json
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def undocumented(out):
    """Names in ``metrics.jsonl`` that stand in no row of the table; NAME in a row stands for any."""
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    known = [re.escape(name).replace("NAME", r"\w+") for row in rows for name in re.findall(r"`([^`]+)`", row)]
    lines = (out / "metrics.jsonl").read_text().splitlines()
    logged = {name for line in lines for name in json.loads(line)}
    return {name for name in logged if not any(re.fullmatch(pattern, name) for pattern in known)}
