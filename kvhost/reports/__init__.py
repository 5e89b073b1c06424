"""Verdicts kept on the controller, as tables, pages and JUnit XML. Writes below reports/ alone."""
