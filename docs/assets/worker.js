// Browsers start no Worker for pages that are opened from a folder, and the search needs one.
// There its script runs in a hidden frame of the page instead.
if (location.protocol === "file:") {
  class FrameWorker extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      this.inner = this.frame.contentWindow
      this.inner.importScripts = async (...urls) => {
        for (const each of urls) await this.load(each)
      }
      // what the script posts is heard here
      this.inner.postMessage = (data) => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      this.loaded = this.load(new URL(url, location.href).href)
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.inner.document.createElement("script")
        script.src = url
        script.onload = resolve
        script.onerror = reject
        this.inner.document.body.append(script)
      })
    }

    async postMessage(data) {
      await this.loaded
      this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data }))
    }

    terminate() {
      this.frame.remove()
    }
  }
  // the theme's script asks for this name to find its own folder
  window.IFrameWorker = window.Worker = FrameWorker
}
