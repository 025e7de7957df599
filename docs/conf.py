"""How Sphinx makes the pages of this folder into a site: ``bash jobs/docs.sh``."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "extensions"), str(HERE.parent)]

import distconv as dc  # noqa: E402

project = "distconv"
author = "the authors of distconv"
version = release = dc.__version__

extensions = [
    *("myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"),
    *("commands", "names", "support", "terms", "excerpts"),
]
exclude_patterns = ["_build", "extensions", "figures"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

# Nothing of the site comes from a network. Excerpts of search results come from a file, since file:// has no server.
html_theme = "furo"
html_title = f"distconv {release}"
html_show_search_summary = False
html_copy_source = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["width.css"]
html_search_scorer = str(HERE / "extensions" / "scorer.js")
copybutton_exclude = ".linenos, .gp, .go"

napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_preprocess_types = True
napoleon_use_ivar = True  # attributes would otherwise be described twice, here and by autodoc

autodoc_typehints = "signature"
autodoc_member_order = "groupwise"
autodoc_inherit_docstrings = False

# Names of other packages, whose pages are elsewhere.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|numpy|np|h5py|mpi4py|MPI|nn|collections|typing|pathlib|os|io|argparse|types)\..*"),
    (
        r"py:.*",
        r"(bool|bytes|dict|float|int|list|object|range|str|tuple|type|None|Any|Path|Tensor|Module|Optimizer|BinaryIO|Arrangement|Box|Panel|SiteBox|TransferBox)",
    ),
    (r"py:class", r"distconv\.(arrangement\.Arrangement|pictures\.Panel)"),
    # Types in the sections of docstrings are prose, such as "mapping of str to int, optional".
    (r"py:class", r"[a-z-]+|.*[ {}\[\]\"=].*"),
]
