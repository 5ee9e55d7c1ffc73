"""`tonari rehearse`: a long run whose nodes fail, in virtual time."""
