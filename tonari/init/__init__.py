"""`tonari init`: a config, a loop and a batch script to begin with."""
