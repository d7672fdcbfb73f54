"""The public data formats, one module per family: each turns a row into a Problem or raises RowError."""
