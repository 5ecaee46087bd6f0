"""What a strategy knows of the sites and how it talks to them.

setup     what the server gives a strategy for one training, and what the strategy remembers
roster    the sites that take part, read from their offers
mail      sends requests and fetches replies until a deadline
post      writes requests, and checks the replies to them
replies   the checks that a reply must pass before a strategy sees it
sessions  opens a session of the exchange, in which sites sum gradients
"""
