"""One resident copy for many trainers: a server that holds staged packs, and clients that attach to them."""
