"""The process in which a server makes live pages: maker.py."""
