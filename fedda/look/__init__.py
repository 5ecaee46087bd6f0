"""What sites tell of their data before any training (`fedda look`), and what follows from it.

account.py    what one site tells: its fields, their layout, and the check of both
advice.py     drift between the sites, what will make training hard, and what to type next
"""
