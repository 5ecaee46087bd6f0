"""The tests of what is built on the core, by the packages of fedda/contrib."""
