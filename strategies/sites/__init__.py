"""What a strategy knows of the sites and how it talks to them.

setup     what the server gives a strategy for one training, and what the strategy remembers
roster    who takes part, by their offers
mail      requests out and replies in, until a deadline
post      requests, and the checked replies to them
replies   what a reply must look like before a strategy sees it
sessions  opening a session of the exchange, in which sites sum gradients
"""
