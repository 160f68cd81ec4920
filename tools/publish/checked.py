"""The published checks of a folder of ops. They may be in several files, with some of the backends in each,
such as `check_linear_logp.json` and a `check_linear_logp_triton.json`."""

import json
from pathlib import Path
from typing import Any

from isobit.frame.op import public_ops


def checked(results_dir: Path, folder: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each backend that was checked, with the stamp of its file. A backend that is in several files counts
    once: from `check_<folder>.json`, or else from the first in alphabetical order."""
    ops = {name for name, op in public_ops().items() if op.folder == folder}
    backends: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {}
    first = results_dir / f"check_{folder}.json"
    for path in (*([first] if first.is_file() else []), *sorted(results_dir.glob(f"check_{folder}_*.json"))):
        report = json.loads(path.read_text())
        for candidate in report["candidates"]:
            if candidate["op"] in ops:  # another folder's name may begin with this one's
                backends.setdefault((candidate["op"], candidate["candidate"]), (candidate, report["stamp"]))
    return list(backends.values())
