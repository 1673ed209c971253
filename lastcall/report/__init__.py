"""Tables, figures and the page, drawn from a `Judged` and nothing else; no statistics are computed here."""
