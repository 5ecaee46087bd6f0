"""fedda as a library: simulate a federation in a program or notebook, and use what it gives.

simulated  one run: `simulate`
beginning  a run's settings, and how it was started
own_data   arrays and datasets of a program, as the sites that a run reads
program_inputs  tables, arrays and images, of whatever library
own_model  a network that a program brings itself
outcome    what a run gives: its results and its models
unchanged  what a run changes in its process, put back

The command line calls the same functions.
"""
