"""One module per engine kind: build it, load it, step it."""
