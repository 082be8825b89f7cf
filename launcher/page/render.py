"""The page: one HTML file that needs nothing else, from what it says as JSON.

Nothing of it may reach the network, and no script but ours runs in it: its policy names the digest of each. Texts of
others are data in it, which no browser executes, and which scripts only ever show as texts.
"""

import base64
import hashlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

_FOLDER = Path(__file__).parent


def render_page(data: bytes, *, title: str, refresh_s: float | None = None) -> bytes:
    """The file.

    Args:
        data: JSON, as `TrialViews.data` gives it.
        refresh_s: after how long it asks whoever serves it for new data; None of a file.
    """
    environment = Environment(loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined)
    library, script = _chart_library(), (_FOLDER / "page.js").read_text()
    page = environment.get_template("page.html").render(
        title=title,
        refresh_s=refresh_s,
        policy=_policy([library, script], is_served=refresh_s is not None),
        style=Markup((_FOLDER / "page.css").read_text()),
        # Within a script element only "<" can end it, or begin another one; JSON may write it otherwise.
        data=Markup(data.decode().replace("<", "\\u003c")),
        library=Markup(library),
        script=Markup(script),
    )
    return page.encode()


def _policy(scripts: Sequence[str], *, is_served: bool) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    connect = "'self'" if is_served else "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; connect-src {connect}; img-src data:; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )


def _chart_library() -> str:
    """The JavaScript of plotly, without importing its Python."""
    spec = find_spec("plotly")
    assert spec is not None and spec.origin is not None, "plotly is one of corral's dependencies"
    return (Path(spec.origin).parent / "package_data" / "plotly.min.js").read_text()
