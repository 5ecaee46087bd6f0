"""Choosing a method and its settings for a target without labels.

candidates   which methods and settings are tried
search       training them in rungs, each with half of the last one's candidates and more rounds
agreement    on how many of the target's images two models predict the same class
decision     the rule: which candidate to take, and how sure that is
verdict      the table, the paragraph and choice.json
"""
