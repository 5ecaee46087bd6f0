"""What a strategy knows of the sites and how it talks to them.

roster          the sites that take part, read from their offers
mail            sends requests and fetches replies until a deadline
post            what the server gives a strategy, and what that remembers; requests, and replies
replies         the checks that a reply must pass before a strategy sees it
correspondence  how a strategy asks the sites of a round, and what a method says of that
sessions        opens a session of the exchange, in which sites sum gradients
"""
