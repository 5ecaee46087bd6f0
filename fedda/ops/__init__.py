"""Operating a federation: keys, certificates, and its programs as processes.

keys           the sites' keys, by which a server knows whom to admit
distributions  an installed package as a site's policy names it
certificate    the server's certificate, and the authority that signs it
spawn          one program as a child process
federation     a whole federation as such processes, on this machine
bundle         the Flower app that `fedda run` submits
system         what operating systems do differently
flwr_home      how flwr's own commands find a SuperLink
"""
