"""The tables the generated catalogue is made from, one module a department; every brand, model and sentence is invented."""
