"""This process in its job: it joins the other ranks, and is watched together with them."""
