"""Reports: self-contained HTML files that open without a network."""

from thinwire.report.page import Block, Chart, Macro, Page, TextTable, write_page
from thinwire.report.run_page import ReportData, read_report_data, run_page

__all__ = [
    "Block",
    "Chart",
    "Macro",
    "Page",
    "ReportData",
    "TextTable",
    "read_report_data",
    "run_page",
    "write_page",
]
