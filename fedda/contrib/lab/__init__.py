"""Beginning a study, comparing methods, and choosing one for a target by a few labels.

new                      a study, or a method of one's own, to begin with
compare, choose, label   the commands that train and rank
select                   from whom a target should learn, by FRUDA's bound
teacher_file, clip       the file of a teacher, by a network that knows pictures and words
comparison               what `fedda compare` does
comparing                the same in a program: `fedda.compare`
labelled                 which images to label, and what labels say of models
measured                 which of several trained methods they rank first
"""
