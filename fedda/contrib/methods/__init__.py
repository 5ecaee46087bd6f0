"""Methods that plug in as those of other packages do: `docs/adding-a-method.md`.

Each is a package of three modules: algorithm, strategy and client.
"""
