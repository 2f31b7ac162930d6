"""What each engine kind does of a build: check its pair, and write what runs it."""
