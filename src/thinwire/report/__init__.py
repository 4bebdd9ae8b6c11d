"""Reports: pages that hold everything they show, and ask no network for any of it."""

from thinwire.report.blocks import Block, Chart, Table, Text
from thinwire.report.page import Page, plotly_source, write_page
from thinwire.report.plan_page import plan_page
from thinwire.report.run_page import Evidence, gather_evidence, run_page

__all__ = [
    "Block",
    "Chart",
    "Evidence",
    "Page",
    "Table",
    "Text",
    "gather_evidence",
    "plan_page",
    "plotly_source",
    "run_page",
    "write_page",
]
