"""The verbs that a docstring of a function may start with, each reviewed: what the function does, in the imperative."""

VERBS = frozenset(
    """
    Abandon Accept Account Accumulate Add Admit Adopt Advance Allocate Allow Announce Answer Append Apply Ask
    Assemble Assert Assign Attach Attempt Attend Begin Bind Block Book Bound Break Bring Broadcast Build Call
    Cancel Cast Change Check Choose Claim Clean Clear Clip Close Collect Combine Commit Compare Complete Compose
    Compress Compute Configure Confirm Connect Construct Continue Convert Copy Count Create Cut Deal Decide Decode
    Defer Delete Deliver Derive Describe Detach Detect Dial Discard Dismiss Distribute Distrust Divide Draw Drive
    Drop Embed Empty Encode End Enter Escape Estimate Evaluate Examine Exchange Execute Exit Expand Expect Explain
    Export Extend Extract Fail Fetch Fill Find Finish Fit Fix Flatten Flip Flush Follow Forget Fork Form Format
    Free Gather Generate Give Group Guard Handle Hash Help Hide Hire Hold Identify Ignore Import Inform Initialise
    Inject Install Interrupt Issue Iterate Join Journal Judge Keep Kill Launch Learn Leave Let Limit Link List
    Listen Load Lock Log Look Lower Make Map Mark Mask Match Measure Meet Merge Migrate Modify Move Multiply Name
    Normalise Note Notice Offer Open Order Pack Pad Parse Pass Pause Perform Permute Pick Place Plan Poll Post
    Predict Prepare Price Print Process Project Promise Propose Prove Prune Publish Put Quarantine Queue Quote
    Raise Rank Read Reap Rebuild Receive Recognise Recompute Record Recover Redact Reduce Refresh Refuse Register
    Reject Release Remember Remove Rename Render Repeat Replace Replay Report Request Require Rescale Reset
    Reshape Resolve Restore Restrict Resume Retry Return Rewrite Run Sample Save Say Scale Scatter Schedule Score
    Seal Search Seat Secure Select Send Serve Set Settle Share Shift Show Shrink Shuffle Shut Sign Signal Simulate
    Skip Slice Sort Split Start State Step Stop Store Strip Substitute Sum Summarise Supervise Supply Suspend Swap
    Switch Synchronise Take Tell Terminate Test Time Tokenize Trace Track Train Transfer Translate Truncate Try
    Turn Undo Unlock Unpack Update Upload Use Validate Verify Visit Wait Wake Walk Warn Watch Weigh Withdraw Wrap
    Write Yield
    """.split()
)
