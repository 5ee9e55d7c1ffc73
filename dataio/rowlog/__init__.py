"""Which rows trained when: a log of what the seed does not tell, and answers from both."""
