"""The command line. `main` mounts the commands; each lives in a module of its own that is loaded when it is called."""
