"""Reports: HTML files that contain everything they show and open without a network."""

from thinwire.report.page import Block, Chart, Page, Part, TextTable, write_page
from thinwire.report.run_page import ReportData, read_report_data, run_page

__all__ = [
    "Block",
    "Chart",
    "Page",
    "Part",
    "ReportData",
    "TextTable",
    "read_report_data",
    "run_page",
    "write_page",
]
