"""What a run found, read back and shown in a terminal; `fedda.page` shows it in a browser.

read       results.json and its numbers over the seeds
terminal   tables of them
picture    a picture of them
progress   how a run goes while it goes
"""
